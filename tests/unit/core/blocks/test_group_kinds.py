"""Kinds that skip tokens, reserve sinks or hold encoder tokens, and mixes of them, directly and through steps."""

from typing import Any

import pytest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import InvalidArgumentError, WrongStateError
from kvpool.core.events import BlockStored
from kvpool.core.execution import apply
from kvpool.core.ids import NULL_BLOCK, BlockHash, BlockId, GroupId, PoolName
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig
from kvpool.core.steps.columns import Operation, Outcome
from support.core import STEP, World, admit, config, opened, request_of
from support.integrity import check_integrity
from support.refusals import refused

FULL = FullAttentionSpec(4)
WINDOW = SlidingWindowSpec(4, sliding_window=6)  # at most two blocks before the next token
CHUNK = ChunkedLocalAttentionSpec(4, attention_chunk_size=8)
STATE = MambaSpec(4)


def pool_of(*specs: KVCacheSpec, num_blocks: int = 40, **options: Any) -> KVCacheManager:
    return KVCacheManager(config(num_blocks, specs=specs, **options))


def fill(pool: KVCacheManager, content: str, num_tokens: int) -> Request:
    """Admits a request without a look-up."""
    request = request_of(pool, content, num_tokens)
    assert pool.allocate_slots(request, num_tokens, sequence=STEP)
    return request


def tables(request: Request) -> list[list[int]]:
    return [list(table.block_ids) for table in request.tables]


@pytest.mark.parametrize(
    ("spec", "hit"),
    [
        (FULL, [1, 2, 3, 4, 5]),
        (WINDOW, [0, 0, 0, 4, 5]),
        (CHUNK, [0, 0, 0, 0, 5]),
        (STATE, [0, 0, 0, 0, 5]),
    ],
)
def test_a_hit_has_only_blocks_that_later_tokens_attend_to(spec: KVCacheSpec, hit: list[int]) -> None:
    pool = pool_of(spec)
    fill(pool, "abcdef", 24)
    computed = pool.find_longest_cache_hit(request_of(pool, "abcdeXYZ", 21))
    assert (list(computed.block_ids[0]), computed.num_tokens) == (hit, 20)


def test_a_finished_chunk_needs_no_blocks_so_unknown_tokens_hit() -> None:
    pool = pool_of(CHUNK)
    computed = pool.find_longest_cache_hit(request_of(pool, "abcdefgh", 22))
    assert (list(computed.block_ids[0]), computed.num_tokens) == ([0, 0, 0, 0], 16)


def test_chunks_need_not_begin_with_a_block() -> None:
    pool = pool_of(ChunkedLocalAttentionSpec(4, attention_chunk_size=6))
    fill(pool, "ab", 8)
    # 8 tokens: the next one looks back to token 6, in block 1; 12: to none before it
    assert pool.find_longest_cache_hit(request_of(pool, "abX", 12)).block_ids == ([0, 2],)
    assert pool.find_longest_cache_hit(request_of(pool, "XYZ", 12)).num_tokens == 0
    assert pool.find_longest_cache_hit(request_of(pool, "XYZU", 14)).num_tokens == 12


def test_a_circular_buffer_is_one_block_that_is_never_cached() -> None:
    pool = pool_of(CircularBufferSpec(6), FULL, enable_events=True)
    assert (pool.hash_block_size, pool.config.hit_alignment) == (4, 4)
    request = fill(pool, "abcdef", 24)
    assert tables(request) == [[1], [2, 3, 4, 5, 6, 7]]
    computed = pool.find_longest_cache_hit(request_of(pool, "abcdeX", 24))
    assert (computed.block_ids, computed.num_tokens) == (([], [2, 3, 4, 5, 6]), 20)
    assert pool.check_computed_blocks(str, computed.block_ids) == 20
    with pytest.raises(InvalidArgumentError, match="a hit of 20 tokens has 0 null blocks here"):
        pool.check_computed_blocks(str, ([BlockId(1)], computed.block_ids[1]))
    small = pool_of(FULL, CircularBufferSpec(6), num_blocks=3)
    assert small.allocate_slots(request_of(small, "ab", 5), 5, sequence=STEP) is None
    assert small.blocks.num_free_blocks == 2


def test_a_pool_of_circular_buffers_cannot_cache() -> None:
    with refused(field="config.disable_caching", match="no group has blocks that can be hit"):
        pool_of(CircularBufferSpec(4))
    pool = pool_of(CircularBufferSpec(4), enable_caching=False)
    assert tables(fill(pool, "abc", 12)) == [[1]]


def test_retained_tokens_are_freed_later_and_not_needed_by_a_hit() -> None:
    spec = SlidingWindowSpec(4, sliding_window=6, extra_retained_tokens=5)
    pool = pool_of(spec)
    request = request_of(pool, "abcdef", 24)
    assert pool.allocate_slots(request, 20, sequence=STEP)
    assert pool.allocate_slots(request, 4, sequence=STEP)
    assert tables(request) == [[0, 0, 3, 4, 5, 6]]  # block 3, of tokens [8, 12), would be free without
    assert pool.can_reject(request, 15)  # the token at 15 reads token 10
    assert not pool.can_reject(request, 12)
    pool.blocks.evict_blocks([BlockId(3)])
    computed = pool.find_longest_cache_hit(request_of(pool, "abcdeX", 24))
    assert (list(computed.block_ids[0]), computed.num_tokens) == ([0, 0, 0, 4, 5], 20)
    again = request_of(pool, "abcdeX", 24)
    assert pool.allocate_slots(again, 4, 0, computed, sequence=STEP)
    assert pool.can_reject(again, 21)


def test_sinks_hold_the_first_blocks_permanently() -> None:
    pool = pool_of(SinkFullAttentionSpec(4, sink_len=8), num_blocks=10)
    assert (pool.sink_blocks, pool.blocks.num_free_blocks) == ((1, 2), 7)
    request = admit(pool, "ab", 9)
    assert tables(request) == [[3, 4, 5]]
    pool.free(request)
    assert not pool.reset_prefix_cache()
    pool.evict_pending(request.session_number)
    check_integrity(pool, [])


def test_layers_with_pages_of_different_sizes_share_a_table() -> None:
    wide = SlidingWindowSpec(4, 2, sliding_window=6)
    spec = UniformTypeKVCacheSpecs(4, (("a", WINDOW), ("b", wide)))
    pool = KVCacheManager(PoolConfig(PoolName("m"), 40, 256, (KVCacheGroup(spec, ("a", "b")),)))
    admit(pool, "abcdef", 24)
    assert pool.find_longest_cache_hit(request_of(pool, "abcdef", 24)).block_ids == ([0, 0, 0, 4, 5],)


@pytest.mark.parametrize(
    ("lost", "length", "hit"),
    [
        ({}, 28, [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 12, 13]]),
        ({0: [5]}, 28, [[1, 2, 3, 4, 5], [0, 0, 0, 11, 12]]),
        ({1: [3]}, 28, [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 12, 13]]),
        ({1: [4]}, 28, [[1, 2, 3, 4], [0, 0, 10, 11]]),
        ({0: [5], 1: [4]}, 28, [[1, 2, 3, 4], [0, 0, 10, 11]]),
        ({0: [4], 1: [2, 3]}, 28, [[1, 2], [8, 9]]),
        ({0: [0]}, 28, [[], []]),
        ({1: [0, 2, 4]}, 28, [[], []]),
    ],
)
def test_a_hit_is_the_longest_that_all_groups_can_serve(
    lost: dict[int, list[int]], length: int, hit: list[list[int]]
) -> None:
    pool = pool_of(FULL, WINDOW)
    request = admit(pool, "abcdefg", length)
    for group_id, indices in lost.items():
        pool.blocks.evict_blocks([request.tables[group_id].block_ids[i] for i in indices])
    computed = pool.find_longest_cache_hit(request_of(pool, "abcdefg", length))
    assert [list(blocks) for blocks in computed.block_ids] == hit
    assert computed.num_tokens == 4 * len(hit[0])


def test_eagle_over_chunks_drops_a_hit_without_a_following_cached_block() -> None:
    pool = pool_of(CHUNK, use_eagle=True)
    assert pool.find_longest_cache_hit(request_of(pool, "abcdef", 22)).num_tokens == 0
    fill(pool, "abcdef", 24)
    assert pool.find_longest_cache_hit(request_of(pool, "abcdeX", 24)).num_tokens == 16


def test_context_parallelism_over_mixed_kinds() -> None:
    pool = pool_of(FULL, STATE, dcp_world_size=2)
    request = admit(pool, "abcdef", 21)
    assert tables(request) == [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    assert pool.find_longest_cache_hit(request_of(pool, "abcdef", 21)).block_ids == ([1, 2], [0, 0, 0, 7])


def test_events_of_a_window_contain_only_held_blocks() -> None:
    pool = pool_of(WINDOW, enable_events=True)
    request = request_of(pool, "abcdef", 24)
    for new in (20, 4):
        pool.allocate_slots(request, new, delay_cache_blocks=True, sequence=STEP)
    pool.cache_blocks(request, 24, sequence=STEP)
    (stored,) = pool.blocks.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == (tuple(request.hashes[3:]), request.hashes[2])
    assert list(stored.token_ids) == list(range(12, 24))


def mixed_world() -> tuple[World, Session]:
    world, session = opened(40, specs=[FULL, WINDOW])
    world.admit(session, 1, "abcdef", 24)
    return world, session


def lookup(world: World, session: Session, number: int, content: str, num_tokens: int) -> list[list[int]]:
    result = world.declare(session, Operation.LOOKUP, number, content, num_tokens)
    first, second = result.num_prefix_blocks or (0, 0)
    return [result.block_ids[:first], result.block_ids[first : first + second]]


def test_another_session_hits_mixed_groups_only_after_execution() -> None:
    world, session = mixed_world()
    other = world.open()
    assert lookup(world, other, 1, "abcdeX", 24) == [[], []]
    world.executed(session)
    assert lookup(world, other, 2, "abcdeX", 24) == [[1, 2, 3, 4, 5], [0, 0, 0, 10, 11]]
    result = world.run(other, Operation.LOOKUP, request_numbers=[2])
    assert (result.num_hit_tokens, result.num_shared_hit_tokens) == ([20], [20])


def test_an_ended_session_withdraws_unexecuted_blocks_of_all_groups() -> None:
    world, session = mixed_world()
    world.allocate(session, 1, 1)
    world.allocator.close_session(session.session_id, world.now_seconds)
    assert (len(world.pool.blocks.prefix_map), world.pool.blocks.num_free_blocks) == (0, 39)
    assert lookup(world, world.open(), 1, "abcdeX", 24) == [[], []]


@pytest.mark.parametrize(
    ("hit_blocks", "words"),
    [
        ([[1, 2, 3], [0, 0]], "group 0 covers 12 tokens"),
        ([[1, 2, 3, 4, 5], [0, 0, 10, 10, 11]], "has 3 null blocks"),
        ([[1, 2, 3, 4, 5], [0, 0, 0, 0, 11]], "has 3 null blocks"),
        ([[1, 0, 3, 4, 5], [0, 0, 0, 10, 11]], "has 0 null blocks"),
        ([[1, 2, 3, 4, 5], []], "group 0 covers 20 tokens"),
    ],
)
def test_blocks_that_cannot_be_a_hit_are_refused(hit_blocks: list[list[int]], words: str) -> None:
    world, session = mixed_world()
    assert lookup(world, session, 2, "abcdeX", 24) == [[1, 2, 3, 4, 5], [0, 0, 0, 10, 11]]
    with world.refuses(match=words):
        world.allocate(session, 2, 4, hit=hit_blocks)


@pytest.mark.parametrize("group_id", [0, 1])
def test_a_hit_evicted_in_any_group_is_a_changed_hit(group_id: int) -> None:
    world, session = mixed_world()
    hit_blocks = lookup(world, session, 2, "abcdeX", 24)
    world.run(session, Operation.EVICT, num_block_ids=[1, 0], block_ids=[hit_blocks[group_id][4]])
    result = world.allocate(session, 2, 4, hit=hit_blocks)
    assert (result.outcomes, result.num_hit_tokens) == ([Outcome.HIT_CHANGED], [16])


def test_rejected_tokens_must_be_within_held_blocks() -> None:
    world, session = mixed_world()
    world.allocate(session, 1, 4)  # frees blocks 0 to 3 of the window
    with world.refuses(field="num_rejected_tokens[0]", match="reach back behind a window"):
        world.run(session, Operation.APPEND, request_numbers=[1], num_rejected_tokens=[8])
    world.run(session, Operation.APPEND, request_numbers=[1], num_rejected_tokens=[7])


def test_a_hit_with_a_block_of_another_group_is_a_changed_hit() -> None:
    world, session = opened(40, specs=[FULL, FULL])
    world.admit(session, 1, "abc", 12)
    assert lookup(world, session, 2, "abX", 12) == [[1, 2], [4, 5]]
    result = world.allocate(session, 2, 4, num_block_ids=[2, 2], block_ids=[4, 5, 1, 2])
    assert (result.outcomes, result.block_ids) == ([Outcome.HIT_CHANGED], [1, 2, 4, 5])


def test_a_request_of_cross_attention_alone_is_admitted_once() -> None:
    world, session = opened(40, specs=[CrossAttentionSpec(4)], enable_caching=False)
    world.admit(session, 1, "", 100)  # no encoder tokens: admitted, and holds no block
    for operation in (Operation.ADMIT, Operation.LOOKUP):
        with world.refuses(WrongStateError, match="holds blocks already"):
            world.run(session, operation, request_numbers=[1])
    world.run(session, Operation.PREEMPT, request_numbers=[1])
    result = world.run(session, Operation.ADMIT, request_numbers=[1], num_encoder_tokens=[9])
    assert result.num_new_blocks == [3]


def test_operations_times_groups_are_bounded() -> None:
    world, session = opened(40, specs=[FULL] * 256)
    with world.refuses(field="operations", match=r"1025 is not in \[0, 1024\]"):
        world.run(session, *[Operation.EVICT] * 1025)
    world.run(session, *[Operation.EVICT] * 1024)


def test_a_step_over_its_work_limit_allocates_no_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "MAX_STEP_WORK", 10)
    world, session = mixed_world()
    requests = world.pool.stats.requests
    operations = [*[Operation.LOOKUP_UNCOUNTED] * 2, Operation.LOOKUP, Operation.ADMIT, Operation.APPEND]
    result = world.declare_all(session, operations, ["abcdeX"] * 5, 24, first=2)
    assert result.outcomes == [0, *[Outcome.SKIPPED] * 3, 0]
    assert (len(result.block_ids), world.pool.stats.requests) == (10, requests)
    assert world.run(session, Operation.ADMIT, request_numbers=[2]).outcomes == []
    result = world.run(session, Operation.FREE, Operation.ALLOCATE, request_numbers=[1, 2], num_new_tokens=[0, 1])
    assert result.outcomes == []


def test_windows_that_shorten_a_hit_in_turn_do_not_repeat_look_ups() -> None:
    """The number of look-ups is linear in the number of blocks, not quadratic."""
    num_blocks = 400
    pool = pool_of(
        SlidingWindowSpec(1, sliding_window=100),
        SlidingWindowSpec(1, sliding_window=2),
        SlidingWindowSpec(1, sliding_window=2),
        num_blocks=3 * num_blocks + 1,
    )
    request = fill(pool, "", 250)
    for group_id, odd in ((1, 1), (2, 0)):
        pool.blocks.evict_blocks(request.tables[group_id].block_ids[odd::2])
    looked_up = 0

    class Counted(list[BlockHash]):
        def __getitem__(self, at: Any) -> Any:
            nonlocal looked_up
            found = super().__getitem__(at)
            looked_up += len(found) if isinstance(at, slice) else 1
            return found

    request = request_of(pool, "", 250)
    request.hashes = Counted(request.hashes)
    assert pool.find_longest_cache_hit(request).num_tokens == 0
    assert 250 <= looked_up <= 3 * 250


def test_a_replayed_window_gets_new_blocks_for_the_end_of_a_hit() -> None:
    window = SlidingWindowMLASpec(4, sliding_window=8, bounded_replay=True)
    pool = pool_of(FullAttentionSpec(4), window)
    admit(pool, "abcdef", 24)
    request = request_of(pool, "abcdef", 24)
    computed = pool.find_longest_cache_hit(request)
    assert computed.block_ids == ([1, 2, 3, 4, 5], [NULL_BLOCK] * 3)  # tokens from 12 on are in the window of token 20
    assert pool.check_computed_blocks(str, computed.block_ids) == 20
    assert pool.is_still_cached(request, computed)
    new = pool.allocate_slots(request, 0, computed=computed, sequence=STEP)
    assert new is not None
    assert [len(ids) for ids in new] == [0, 2]
    assert pool.blocks.prefix_map.num_cached(GroupId(1)) == 0
    assert pool.can_reject(request, 12)
    assert not pool.can_reject(request, 8)


def test_a_hit_has_only_null_blocks_in_a_replayed_window() -> None:
    pool = pool_of(FullAttentionSpec(4), SlidingWindowMLASpec(4, sliding_window=8, bounded_replay=True))
    for block_ids in ([], [0, 0], [0, 0, 7]):
        with pytest.raises(InvalidArgumentError):
            pool.check_computed_blocks(str, (list(map(BlockId, range(1, 6))), list(map(BlockId, block_ids))))
