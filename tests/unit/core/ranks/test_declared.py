"""Ranks that declare their memory. Rule numbers are those of core/ranks/declared.py."""

from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.errors import AbortedError, InvalidArgumentError, KvpoolError, WrongStateError
from kvpool.core.ids import SessionNumber
from kvpool.core.planning.plan import KVCacheTensor
from kvpool.core.ranks.declared import Difference, declared_difference
from kvpool.core.ranks.effects import EpochPassed, ProcessesGone
from kvpool.core.ranks.messages import (
    MAX_NAMED_SESSIONS,
    DeclaredMemory,
    HeldTensors,
    LinkId,
    Planned,
    Ready,
    Registration,
)
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
from kvpool.core.specs.pool_config import HashScheme, KVCacheGroup, ReuseOrder
from support.ranks import BLOCK_BYTES, LAYER, LAYERS, Gathering, declared, declaring, registration
from support.refusals import refused

WINDOW = SlidingWindowSpec(16, 2, 64, "bfloat16", sliding_window=32)
WIDE = FullAttentionSpec(16, 4, 64, "bfloat16")


def group(*names: str) -> KVCacheGroup:
    return KVCacheGroup(LAYER, names)


def windows(*names: str) -> KVCacheGroup:
    return KVCacheGroup(WINDOW, names)


def uniform(names: tuple[str, ...], **layers: FullAttentionSpec) -> KVCacheGroup:
    return KVCacheGroup(UniformTypeKVCacheSpecs(16, tuple(layers.items())), names)


def form(*memories: DeclaredMemory, world: Gathering | None = None) -> tuple[Gathering, list[LinkId]]:
    """Forms a pool with one rank for each declaration."""
    world = world or Gathering()
    links = [world.register(declaring(rank, len(memories), memory)) for rank, memory in enumerate(memories)]
    world.allocate_all(*links)
    return world, links


def planned(world: Gathering, link: LinkId) -> Planned:
    plan = next(each for each in reversed(world.sent[link]) if isinstance(each, Planned))
    assert isinstance(plan, Planned)
    return plan


def refuse(world: Gathering, registered: Registration) -> KvpoolError:
    with world.refuses(KvpoolError) as caught:
        world.register(registered)
    return caught.value


def test_rule_3_the_pool_gets_the_declared_configuration() -> None:
    memory = declared(
        reuse_order=ReuseOrder.LRU,
        enable_events=True,
        hash_scheme=HashScheme("vllm_sha256", 32, b"n" * 32),
        max_in_flight_tokens=512,
        use_eagle=True,
    )
    world, links = form(memory, memory)
    assert world.opened == memory.config
    assert [world.last(link) for link in links] == [Ready(1, 100, 1024)] * 2
    assert world.members.registry.fingerprint == memory.fingerprint


def test_sparse_caching_of_windows_is_declared_too() -> None:
    memory = declared(groups=(group("a"), windows("b")), retention_tokens=64)
    world, _ = form(memory)
    assert world.opened.retention_tokens == 64


def test_rule_2_the_smallest_number_of_blocks_applies_to_all() -> None:
    world, links = form(declared(blocks=500), declared(blocks=80, block_bytes=3 * BLOCK_BYTES))
    assert world.opened.num_blocks == 80
    configs = [planned(world, link).config for link in links]
    assert [config.num_blocks for config in configs] == [80, 80]
    assert [config.tensors for config in configs] == [
        (KVCacheTensor(80 * BLOCK_BYTES, tuple(LAYERS)),),
        (KVCacheTensor(80 * 3 * BLOCK_BYTES, tuple(LAYERS)),),
    ]
    assert configs[0].groups == declared().config.groups


def with_host(*counts: int, world: Gathering | None = None, **said: Any) -> tuple[Gathering, list[LinkId]]:
    """Forms a pool with one rank for each number of blocks in host memory."""
    world = world or Gathering()
    ranks = [replace(declaring(i, len(counts), **said), num_host_blocks=count) for i, count in enumerate(counts)]
    links = [world.register(rank) for rank in ranks]
    world.allocate_all(*links)
    return world, links


@pytest.mark.parametrize(("counts", "fewest"), [((50, 20), 20), ((50, 0), 0), ((7, 7), 7)])
def test_rule_2_the_smallest_number_of_blocks_in_host_memory_applies_to_all(
    counts: tuple[int, int], fewest: int
) -> None:
    world, links = with_host(*counts)
    assert world.opened == replace(declared().config, num_host_blocks=fewest)
    assert [world.last(link) for link in links] == [Ready(1, 100, 1024, fewest)] * 2


def test_a_restarted_server_knows_the_blocks_in_host_memory() -> None:
    world, _ = with_host(50, 20)
    restored = Gathering()
    restored.epoch = 1
    restored.members.restore(world.members.rank_group(), map(LinkId, range(100, 102)), 1000.0)
    for rank, count in enumerate((50, 20)):
        returned = replace(declaring(rank, held=HeldTensors(1, 100)), num_host_blocks=count, last_epoch=1)
        link = restored.register(returned)
    assert restored.last(link) == Ready(1, 100, 1024, 20)


def test_a_rank_that_returns_with_another_number_of_blocks_in_host_memory_begins_an_epoch() -> None:
    world, _ = with_host(50)
    link = world.register(replace(declaring(0, 1, held=HeldTensors(1, 100)), num_host_blocks=20, last_epoch=1))
    assert world.pool[-1] == EpochPassed(2)
    world.allocate(link)
    assert (world.epoch, world.opened.num_host_blocks) == (2, 20)


@pytest.mark.parametrize(
    "registered",
    [
        replace(declaring(), num_host_blocks=-1),
        replace(declaring(), num_host_blocks=2**31),
        replace(declaring(memory=declared(enable_caching=False)), num_host_blocks=1),
        replace(registration(), num_host_blocks=1),
    ],
    ids=["negative", "too many", "without caching", "without a declaration"],
)
def test_blocks_in_host_memory_need_a_declaration_with_caching(registered: Registration, world: Gathering) -> None:
    assert refuse(world, registered).field == "num_host_blocks"


def test_engines_declare_no_blocks_in_host_memory(world: Gathering) -> None:
    error = refuse(world, declaring(memory=declared(num_host_blocks=1)))
    assert error.field == "declared.config.num_host_blocks"
    assert "the lenders state it" in error.message


def test_a_server_limits_the_blocks_of_both_memories() -> None:
    world = Gathering(max_blocks=119)
    error = world.expect(world.register(replace(declaring(0, 1), num_host_blocks=20)), InvalidArgumentError)
    assert (error.reason, error.field) == ("TOO_MANY_BLOCKS", "register.num_host_blocks")
    assert not world.members.registry


def test_a_server_limits_the_declared_blocks() -> None:
    world = Gathering(max_blocks=99)
    error = world.expect(world.register(declaring(0, 1)), InvalidArgumentError)
    assert (error.reason, error.field) == ("TOO_MANY_BLOCKS", "register.declared.config.num_blocks")
    assert not world.members.registry


def test_pipeline_stages_declare_different_layers_of_the_same_groups() -> None:
    stages = [
        declared(groups=(group("layer.0"), windows("layer.1"))),
        declared(groups=(group("layer.2"), windows())),
    ]
    world, links = form(*stages)
    assert [each.layer_names for each in world.opened.groups] == [("layer.0", "layer.2"), ("layer.1",)]
    assert planned(world, links[1]).config.groups == stages[1].config.groups
    assert planned(world, links[1]).config.tensors[0].shared_by == ("layer.2",)


def test_what_the_fingerprint_says_of_a_rank_may_differ_between_ranks_only() -> None:
    stages = [declared(fingerprint=(("model", "llama"), ("rank_placement", digest))) for digest in "ab"]
    world, links = form(*stages, declared(fingerprint=(("model", "llama"),)))
    assert world.is_serving
    assert declared_difference(*stages) == Difference('fingerprint["rank_placement"]', "'a'", "'b'")
    assert declared_difference(stages[0], stages[0]) is None
    world.break_link(links[1])
    error = refuse(world, declaring(1, 3, declared(fingerprint=(("model", "gemma"), ("rank_placement", "b")))))
    assert error.field == 'register.declared.fingerprint["model"]'


def test_groups_of_uniform_type_get_the_layers_of_all_stages() -> None:
    stages = [
        declared(groups=(uniform(("a", "b"), a=LAYER, b=WIDE), windows("w"))),
        declared(groups=(uniform(("c",), c=WIDE), windows())),
        declared(groups=(uniform((), a=LAYER, b=WIDE), windows("v"))),
    ]
    world, _ = form(*stages)
    merged, window = world.opened.groups
    assert merged == uniform(("a", "b", "c"), a=LAYER, b=WIDE, c=WIDE)
    assert window.layer_names == ("w", "v")
    world.opened.check()


@pytest.mark.parametrize(
    ("memory", "field"),
    [
        (declared(groups=(group("layer.0"), windows("layer.1"))), "config.groups"),
        (declared(groups=(KVCacheGroup(WIDE, tuple(LAYERS)),)), "config.groups[0].spec.num_kv_heads"),
        (declared(groups=(windows(*LAYERS),)), "config.groups[0].spec.type"),
        (declared(groups=(uniform(tuple(LAYERS), **LAYERS),)), "config.groups[0].spec.type"),
        (declared(groups=(KVCacheGroup(LAYER, tuple(LAYERS), has_no_draft=True),)), "config.groups[0].has_no_draft"),
        (declared(max_model_len=2048), "config.max_model_len"),
        (declared(reuse_order=ReuseOrder.LRU), "config.reuse_order"),
        (declared(enable_caching=False), "config.enable_caching"),
        (declared(max_in_flight_tokens=9), "config.max_in_flight_tokens"),
        (declared(hash_scheme=HashScheme("xxhash_cbor")), "config.hash_scheme.algorithm"),
        (declared(hash_scheme=HashScheme(none_hash=b"n" * 32)), "config.hash_scheme.none_hash"),
        (declared(fingerprint=(("model", "llama"), ("revision", "2"))), 'fingerprint["revision"]'),
        (declared(fingerprint=(("model", "llama"),)), 'fingerprint["revision"]'),
        (
            declared(fingerprint=(("dtype", "fp8"), ("model", "llama"), ("revision", "1"))),
            'fingerprint["dtype"]',
        ),
    ],
)
def test_rule_1_the_first_difference_is_named(memory: DeclaredMemory, field: str, world: Gathering) -> None:
    world.register(declaring(0))
    error = refuse(world, declaring(1, memory=memory))
    assert isinstance(error, WrongStateError)
    assert (error.reason, error.field) == ("RANKS_DISAGREE", f"register.declared.{field}")


@pytest.mark.parametrize(
    ("memory", "field"),
    [
        (
            declared(groups=(KVCacheGroup(UniformTypeKVCacheSpecs(32, (("c", FullAttentionSpec(32)),)), ("c",)),)),
            "spec.layers[0].block_size",
        ),
        (declared(groups=(uniform(("a",), a=WIDE),)), 'spec.layers["a"].num_kv_heads'),
    ],
)
def test_a_layer_of_a_uniform_group_that_differs_is_named(memory: DeclaredMemory, field: str, world: Gathering) -> None:
    world.register(declaring(0, memory=declared(groups=(uniform(("a", "b"), a=LAYER, b=WIDE),))))
    assert refuse(world, declaring(1, memory=memory)).field == f"register.declared.config.groups[0].{field}"


def test_all_ranks_declare_or_none(world: Gathering) -> None:
    world.register(registration(0))
    assert refuse(world, declaring(1)).field == "register.declared"
    world = Gathering()
    world.register(declaring(0))
    error = refuse(world, registration(1))
    assert (error.reason, error.field) == ("RANKS_DISAGREE", "register.declared")


def entries(count: int) -> tuple[tuple[str, str], ...]:
    return tuple((f"{i:03}", "") for i in range(count))


@pytest.mark.parametrize(
    ("memory", "field"),
    [
        (declared(name="other"), "config.name"),
        (declared(blocks=1), "config.num_blocks"),
        (declared(max_model_len=0), "config.max_model_len"),
        (declared(groups=()), "config.groups"),
        (declared(groups=(group(),)), "config.groups"),
        (declared(groups=(group("a", "a"),)), "config.groups[0].layer_names[1]"),
        (declared(groups=(uniform(("b",), a=LAYER),)), "config.groups[0].layer_names"),
        (declared(block_bytes=0), "size_bytes"),
        (declared(block_bytes=2 * BLOCK_BYTES), "size_bytes"),
        (replace(declared(), size_bytes=100 * BLOCK_BYTES - 1), "size_bytes"),
        (declared(fingerprint=entries(65)), "fingerprint"),
        (declared(fingerprint=(("b", ""), ("a", ""))), "fingerprint"),
        (declared(fingerprint=(("a", ""), ("a", ""))), "fingerprint"),
        (declared(fingerprint=(("", "x"),)), 'fingerprint[""]'),
        (declared(fingerprint=(("é" * 33, "x"),)), f'fingerprint["{"é" * 33}"]'),
        (declared(fingerprint=(("dtype", "x" * 1025),)), 'fingerprint["dtype"]'),
    ],
)
def test_a_declaration_out_of_range_is_refused(memory: DeclaredMemory, field: str, world: Gathering) -> None:
    world.register(declaring(1))
    error = refuse(world, declaring(0, memory=memory, blocks=101))
    assert isinstance(error, InvalidArgumentError)
    assert error.field == f"declared.{field}"


def test_bounds_of_a_declaration_are_accepted() -> None:
    memory = declared(fingerprint=tuple((f"{i:064}", "x" * 1024) for i in range(64)))
    world, _ = form(memory)
    assert world.is_serving


def test_a_rank_that_returns_with_the_same_declaration_changes_nothing() -> None:
    world, links = form(declared(), declared())
    world.break_link(links[0])
    link = world.register(declaring(0, held=HeldTensors(1, 100)))
    assert world.last(link) == Ready(1, 100, 1024)
    assert (world.epoch, world.is_serving) == (1, True)


@pytest.mark.parametrize(
    "changes",
    [{"blocks": 50}, {"block_bytes": 2 * BLOCK_BYTES}, {"fingerprint": ()}, {"groups": (group("other"),)}],
)
def test_a_lone_rank_that_returns_with_another_declaration_begins_an_epoch(changes: dict[str, Any]) -> None:
    world, _ = form(declared())
    link = world.register(declaring(0, 1, declared(**changes), held=HeldTensors(1, 100)))
    assert world.pool[-1] == EpochPassed(2)
    world.allocate(link)
    assert (world.epoch, world.opened) == (2, declared(**changes).config)


def test_a_lone_rank_may_change_what_all_ranks_share() -> None:
    world, _ = form(declared())
    memory = declared(max_model_len=64)
    links = [world.register(declaring(rank, 2, memory, boot_id=f"process-{rank}")) for rank in range(2)]
    world.allocate_all(*links)
    assert (world.epoch, world.members.registry.world_size) == (2, 2)
    assert world.members.registry.options.max_model_len == world.opened.max_model_len == 64


def test_while_another_rank_lives_a_rank_may_change_its_size_only() -> None:
    world, _ = form(declared(), declared())
    assert refuse(world, declaring(0, memory=declared(fingerprint=()))).field.startswith(
        "register.declared.fingerprint"
    )
    assert world.is_serving
    link = world.register(declaring(0, memory=declared(blocks=60)))
    assert planned(world, link).config.num_blocks == 60
    assert not world.is_serving


def test_a_group_whose_ranks_are_all_lost_is_formed_again_with_another_declaration() -> None:
    world, links = form(declared(), declared())
    for link in links:
        world.break_link(link)
    memory = declared(fingerprint=(("model", "other"),), max_model_len=512)
    first = world.register(declaring(1, memory=memory, boot_id="another-1"))
    assert world.pool[-1] == EpochPassed(2)
    assert refuse(world, declaring(0)).reason == "RANKS_DISAGREE"
    second = world.register(declaring(0, memory=memory, boot_id="another-0"))
    world.allocate_all(first, second)
    assert (world.epoch, world.opened) == (2, memory.config)


def test_ranks_that_plan_may_follow_ranks_that_declared() -> None:
    world, links = form(declared(), declared())
    for link in links:
        world.break_link(link)
    others = [world.register(registration(rank, boot_id=f"planned-{rank}")) for rank in range(2)]
    world.allocate_all(*others)
    assert (world.epoch, world.members.registry.fingerprint) == (2, ())


NUMBERS = (SessionNumber(3), SessionNumber(5))


def test_the_exit_of_a_process_ends_its_sessions_also_while_a_rank_is_lost() -> None:
    world, links = form(declared(), declared())
    assert world.members.sessions_gone(links[0], NUMBERS) == [ProcessesGone(NUMBERS)]
    world.break_link(links[1])
    assert world.members.sessions_gone(links[0], NUMBERS) == [ProcessesGone(NUMBERS)]


def test_without_an_epoch_no_session_is_open(world: Gathering) -> None:
    link = world.register(declaring(0))
    assert world.members.sessions_gone(link, NUMBERS) == []


def test_only_a_rank_that_declared_memory_reports_processes(world: Gathering, links: list[LinkId]) -> None:
    with refused(field="sessions_gone"):
        world.members.sessions_gone(links[0], NUMBERS)


def test_the_number_of_sessions_in_a_report_is_limited() -> None:
    world, links = form(declared())
    world.members.sessions_gone(links[0], list(map(SessionNumber, range(MAX_NAMED_SESSIONS))))
    with refused(field="sessions_gone.session_numbers"):
        world.members.sessions_gone(links[0], list(map(SessionNumber, range(MAX_NAMED_SESSIONS + 1))))


def test_a_rank_that_was_given_up_reports_no_processes() -> None:
    world, links = form(declared())
    world.do(world.members.leave(links[0]))
    with pytest.raises(AbortedError):
        world.members.sessions_gone(links[0], NUMBERS)
