"""Registrations of ranks round-trip, and errors name fields as the rank knows them."""

from dataclasses import replace

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.plan import KVCacheConfig, KVCacheTensor
from kvpool.core.ranks.messages import HeldTensors, Planned, Ready, Registration
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
from kvpool.core.specs.pool_config import HashScheme, KeyForm, KVCacheGroup, ReuseOrder
from kvpool.v1 import pool_pb2, spec_pb2, worker_pb2
from kvpool.wire.ranks import (
    registration_from_proto,
    registration_to_proto,
    server_message_from_proto,
    server_message_to_proto,
)
from kvpool.wire.specs import spec_to_proto
from support.ranks import LAYER, OPTIONS, declared, declaring, registration

WIDE = FullAttentionSpec(16, 4, 64, "bfloat16")
WINDOW = SlidingWindowSpec(16, 2, 64, "bfloat16", sliding_window=32)
STATE = MambaSpec(16, ((2, 3), (4,)), ("float32", "bfloat16"))


@pytest.mark.parametrize("offsets_bytes", [(), (0, 64, 0)])
def test_a_plan_round_trips(offsets_bytes: tuple[int, ...]) -> None:
    tensor = KVCacheTensor(8 * 4096, ("a", "b", "w"), offsets_bytes)
    groups = (KVCacheGroup(WIDE, ("a", "b")), KVCacheGroup(WINDOW, ("w",)))
    plan = Planned(3, KVCacheConfig(8, (tensor,), groups), 512)
    assert server_message_from_proto(server_message_to_proto(plan)) == plan


def test_a_ready_pool_round_trips() -> None:
    ready = Ready(3, 8, 512, 20)
    assert server_message_from_proto(server_message_to_proto(ready)) == ready


def over_the_wire(registered: Registration) -> Registration:
    encoded = registration_to_proto("m", registered).SerializeToString()
    return registration_from_proto(worker_pb2.Register.FromString(encoded))


@pytest.mark.parametrize(
    "registered",
    [
        registration(1, 3, held=HeldTensors(2, 80), fences=True),
        registration(options=replace(OPTIONS, hash_scheme=HashScheme("own", 9, b"x"), retention_tokens=0)),
        registration(options=replace(OPTIONS, block_outermost=True, disable_hybrid_kv_cache_manager=True)),
        replace(declaring(1, 3, held=HeldTensors(2, 80), fences=True), num_host_blocks=70),
        declaring(memory=declared(hash_scheme=HashScheme("own", 9, b"x", KeyForm.PLAIN), max_in_flight_tokens=7)),
        declaring(
            memory=declared(
                groups=(
                    KVCacheGroup(UniformTypeKVCacheSpecs(16, (("a", LAYER), ("b", WIDE))), ("a", "b")),
                    KVCacheGroup(UniformTypeKVCacheSpecs(16, (("c", LAYER),))),
                    KVCacheGroup(WINDOW, ("w",), has_no_draft=True),
                    KVCacheGroup(STATE),
                ),
                reuse_order=ReuseOrder.LRU,
                enable_caching=False,
                enable_events=True,
                use_eagle=True,
                dcp_world_size=2,
            )
        ),
        declaring(memory=declared(fingerprint=(("", "é"), ("model", "")))),
    ],
)
def test_a_registration_round_trips(registered: Registration) -> None:
    found = over_the_wire(registered)
    scheme = found.options.hash_scheme
    assert replace(found, options=replace(found.options, hash_scheme=registered.options.hash_scheme)) == replace(
        registered, declared=found.declared
    )
    assert scheme.hash_size_bytes == registered.options.hash_scheme.hash_size_bytes
    assert over_the_wire(found) == found
    if registered.declared:
        assert found.declared
        assert found.declared.fingerprint == registered.declared.fingerprint
        assert not found.declared.config.difference(registered.declared.config)


def test_layers_of_a_uniform_group_have_their_own_specs() -> None:
    group = KVCacheGroup(UniformTypeKVCacheSpecs(16, (("a", LAYER), ("b", WIDE))), ("a", "b"))
    found = over_the_wire(declaring(memory=declared(groups=(group, KVCacheGroup(WINDOW, ("w",))))))
    assert found.layers == {"a": LAYER, "b": WIDE, "w": WINDOW}
    assert found.options.max_model_len == 1024


def test_options_and_layers_beside_a_declaration_are_ignored() -> None:
    message = registration_to_proto("m", declaring())
    expected = registration_from_proto(message)
    message.options.max_model_len = 7
    message.layers.append(spec_pb2.LayerSpec(layer_name="", spec=spec_to_proto(LAYER)))
    assert registration_from_proto(message) == expected


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (pool_pb2.PoolConfig(), "reuse_order"),
        (pool_pb2.PoolConfig(groups=[pool_pb2.KvCacheGroup()]), "groups[0].spec"),
        (
            pool_pb2.PoolConfig(
                groups=[pool_pb2.KvCacheGroup(spec=spec_pb2.KvCacheSpec(full_attention=spec_pb2.FullAttentionSpec()))]
            ),
            "groups[0].spec.full_attention.attention.block_size",
        ),
    ],
)
def test_a_malformed_declaration_is_refused_by_name(config: pool_pb2.PoolConfig, field: str) -> None:
    message = registration_to_proto("m", declaring())
    message.declared.config.CopyFrom(config)
    with pytest.raises(InvalidArgumentError) as caught:
        registration_from_proto(message)
    assert caught.value.field == f"register.declared.config.{field}"


def test_a_layer_that_the_spec_of_its_group_lacks_is_left_to_the_core() -> None:
    group = KVCacheGroup(UniformTypeKVCacheSpecs(16, (("a", LAYER),)), ("b",))
    found = over_the_wire(declaring(memory=declared(groups=(group,))))
    with pytest.raises(InvalidArgumentError) as caught:
        found.check()
    assert caught.value.field == "declared.config.groups[0].layer_names"
