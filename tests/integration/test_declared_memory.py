"""Ranks that declare their memory, against a real server."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvpool.client import Client, InvalidArgumentError, PoolState, WrongStateError, connect
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.specs.pool_config import HashScheme, KVCacheGroup, PoolConfig
from support.ranks import BLOCK_BYTES, LAYER, declared, declaring
from support.server import pool_config, running_server
from support.wire_ranks import WireRank

CONFIG = pool_config(enable_events=True, max_in_flight_tokens=64, hash_scheme=HashScheme(none_hash=b"n" * 32))
MEMORY = DeclaredMemory(CONFIG, 100 * BLOCK_BYTES, (("model", "llama"), ("weights_version", "7")))


@pytest.fixture
def address() -> Iterator[str]:
    with running_server(quarantine_seconds=600.0) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with connect(address) as client:
        yield client


def form(address: str, *memories: DeclaredMemory) -> list[WireRank]:
    """Forms a pool with one rank for each declaration; all answer fences."""
    ranks = [
        WireRank(address).register(declaring(rank, len(memories), memory, fences=True))
        for rank, memory in enumerate(memories)
    ]
    for rank in ranks:
        rank.allocate()
    for rank in ranks:
        rank.wait_for("ready")
    return ranks


def test_a_pool_forms_as_its_ranks_declare(address: str, client: Client) -> None:
    ranks = form(address, MEMORY, replace(MEMORY, config=replace(CONFIG, num_blocks=80), size_bytes=80 * 999))
    for rank, size_bytes in zip(ranks, (80 * BLOCK_BYTES, 80 * 999), strict=True):
        plan = rank.wait_for("plan").plan
        assert (plan.num_blocks, plan.max_model_len) == (80, 1024)
        (tensor,) = plan.tensors
        assert (tensor.size_bytes, [*tensor.shared_by]) == (size_bytes, ["layer.0"])
    with client.open_session("m") as session:
        assert not session.config.difference(replace(CONFIG, num_blocks=80))
        assert session.config.hash_scheme.none_hash == b"n" * 32
        assert session.admit(session.request("r", list(range(100))))
    assert client.get_pool("m").state is PoolState.READY


def test_a_scheduler_may_declare_the_pool_of_its_ranks_again(address: str, client: Client) -> None:
    stages = [
        replace(MEMORY, config=replace(CONFIG, groups=(KVCacheGroup(FullAttentionSpec(4), (f"layer.{i}",)),)))
        for i in range(2)
    ]
    form(address, *stages)
    for config in (CONFIG, stages[1].config, replace(CONFIG, hash_scheme=HashScheme())):
        assert client.create_pool(config).config.groups[0].layer_names == ("layer.0", "layer.1")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (replace(CONFIG, num_blocks=99), "config.num_blocks"),
        (replace(CONFIG, groups=(KVCacheGroup(LAYER),)), "config.groups"),
        (replace(CONFIG, hash_scheme=HashScheme(none_hash=b"m" * 32)), "config.hash_scheme.none_hash"),
    ],
)
def test_a_scheduler_that_declares_another_pool_is_refused(
    address: str, client: Client, config: PoolConfig, field: str
) -> None:
    form(address, MEMORY)
    with pytest.raises(WrongStateError) as caught:
        client.create_pool(config)
    assert (caught.value.reason, caught.value.field) == ("POOL_DIFFERS", field)


@pytest.mark.parametrize(
    ("memory", "reason", "field"),
    [
        (declared(blocks=1), "INVALID_VALUE", "register.declared.config.num_blocks"),
        (declared(name="other"), "INVALID_VALUE", "register.declared.config.name"),
        (replace(MEMORY, size_bytes=2**61), "INVALID_VALUE", "register.declared.size_bytes"),
        (
            replace(MEMORY, fingerprint=(("dtype", "x" * 1025),)),
            "INVALID_VALUE",
            'register.declared.fingerprint["dtype"]',
        ),
        (
            replace(MEMORY, fingerprint=(("model", "llama"), ("weights_version", "8"))),
            "RANKS_DISAGREE",
            'register.declared.fingerprint["weights_version"]',
        ),
        (
            replace(MEMORY, config=replace(CONFIG, groups=(KVCacheGroup(LAYER, ("layer.0",)),))),
            "RANKS_DISAGREE",
            "register.declared.config.groups[0].spec.block_size",
        ),
    ],
)
def test_a_declaration_that_is_refused_names_its_field(
    address: str, client: Client, memory: DeclaredMemory, reason: str, field: str
) -> None:
    WireRank(address).register(declaring(0, memory=MEMORY)).wait_for("registered")
    before = client.get_pool("m")
    error = WireRank(address).register(declaring(1, memory=memory, blocks=200)).wait_ended()
    assert (error.reason, error.field) == (reason, field)
    assert client.get_pool("m") == before


def test_a_pool_above_the_limits_of_the_server_is_refused() -> None:
    with running_server(max_pool_blocks=99) as address:
        error = WireRank(address).register(declaring(0, 1, MEMORY)).wait_ended()
        assert isinstance(error, InvalidArgumentError)
        assert (error.reason, error.field) == ("TOO_MANY_BLOCKS", "register.declared.config.num_blocks")
