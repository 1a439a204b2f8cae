"""Sparse caching of sliding windows: cached blocks, reuse order of the others, and events."""

from itertools import pairwise
from typing import Any

import pytest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.retention import Retention
from kvpool.core.events import BlockStored
from kvpool.core.ids import GroupId, MapId
from kvpool.core.sessions.request import Request
from kvpool.core.specs.kinds import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.columns import Operation
from support.core import STEP, admit, config, opened, request_of

FULL = FullAttentionSpec(4)
WINDOW = SlidingWindowSpec(4, sliding_window=9)
"""A hit needs two blocks of it."""
WINDOW_GROUP = GroupId(1)


def kept(
    num_prompt_tokens: int, end: int, *, shared_prefix_boundary_tokens: int = 0, first: int = 0, **options: Any
) -> list[int]:
    """Returns the blocks of the window in [first, end) that are cached."""
    pool_config = config(specs=[FULL, options.pop("window", WINDOW)], **options)
    rule = Retention.for_group(pool_config, WINDOW_GROUP)
    assert rule
    request = request_of(KVCacheManager(pool_config), "a", num_prompt_tokens)
    request.num_prompt_tokens, request.shared_prefix_boundary_tokens = num_prompt_tokens, shared_prefix_boundary_tokens
    runs = rule.runs(request, first, end)
    assert all(start < stop for start, stop in runs)
    assert all(before[1] < after[0] for before, after in pairwise(runs))
    return [block for start, stop in runs for block in range(start, stop)]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "blocks"),
    [(1, []), (4, []), (5, [0]), (8, [0]), (9, [0, 1]), (40, [7, 8]), (41, [8, 9]), (43, [8, 9])],
)
def test_a_prompt_sent_again_resumes_before_its_last_token(num_prompt_tokens: int, blocks: list[int]) -> None:
    assert kept(num_prompt_tokens, 20, retention_tokens=0) == blocks


@pytest.mark.parametrize(
    ("num_prompt_tokens", "blocks"),
    [(3, [0]), (8, [0, 1]), (39, [6, 7, 8]), (40, [6, 7, 8, 9]), (41, [7, 8, 9])],
)
def test_with_eagle_aligned_prompts_resume_at_two_positions(num_prompt_tokens: int, blocks: list[int]) -> None:
    assert kept(num_prompt_tokens, 20, retention_tokens=0, use_eagle=True) == blocks


def test_a_tail_ends_at_each_segment() -> None:
    assert kept(1, 13, retention_tokens=16) == [2, 3, 6, 7, 10, 11]
    assert kept(1, 12, retention_tokens=16, first=7) == [7, 10, 11]
    assert kept(1, 15, retention_tokens=16) == [2, 3, 6, 7, 10, 11, 14]  # part of a tail that is not filled yet
    assert kept(30, 13, retention_tokens=32) == [5, 6, 7]
    assert kept(1, 13, retention_tokens=16, use_eagle=True) == [0, 2, 3, 4, 6, 7, 8, 10, 11, 12]


def test_a_tail_ends_at_the_end_of_a_shared_prefix() -> None:
    assert kept(60, 20, retention_tokens=0, shared_prefix_boundary_tokens=22) == [3, 4, 12, 13]
    assert kept(60, 20, retention_tokens=0, shared_prefix_boundary_tokens=57) == [12, 13]
    assert kept(60, 20, retention_tokens=0, shared_prefix_boundary_tokens=20, use_eagle=True) == [
        3,
        4,
        5,
        11,
        12,
        13,
        14,
    ]


def test_with_eagle_a_tail_can_also_end_a_block_before_a_shared_prefix() -> None:
    options: dict[str, Any] = {"retention_tokens": 0, "keeps_block_before_boundary": True}
    shared = {"shared_prefix_boundary_tokens": 20, **options}
    assert kept(60, 20, use_eagle=True, **shared) == [2, 3, 4, 5, 11, 12, 13, 14]
    assert kept(60, 20, **shared) == [3, 4, 12, 13]
    assert kept(60, 20, use_eagle=True, **options) == [11, 12, 13, 14]


def test_lengths_are_whole_hits() -> None:
    """Hits of blocks of 4 and 12 tokens are multiples of 12."""
    rule = Retention.for_group(config(specs=[FullAttentionSpec(12), WINDOW], retention_tokens=0), WINDOW_GROUP)
    assert rule
    assert rule.alignment_tokens == 12
    request = request_of(KVCacheManager(config()), "a", 40)
    request.num_prompt_tokens, request.shared_prefix_boundary_tokens = 23, 40
    assert rule.runs(request, 0, 20) == [(1, 3), (7, 9)]


@pytest.mark.parametrize(
    ("specs", "options"),
    [
        ([FULL, WINDOW], {}),
        ([FULL, WINDOW], {"retention_tokens": 0, "enable_caching": False}),
        ([FULL, WINDOW], {"retention_tokens": 8}),
        ([FULL, WINDOW], {"retention_tokens": 12, "use_eagle": True}),
        ([FULL, FULL], {"retention_tokens": 0}),
        ([FULL, ChunkedLocalAttentionSpec(4, attention_chunk_size=8)], {"retention_tokens": 0}),
    ],
)
def test_there_is_no_rule_if_all_blocks_are_cached(specs: list[Any], options: dict[str, Any]) -> None:
    assert Retention.for_group(config(specs=specs, **options), WINDOW_GROUP) is None


def hashed(pool: KVCacheManager, request: Request, group_id: int = 1) -> list[bool]:
    return [pool.blocks.prefix_map.block_hash(block_id) is not None for block_id in request.tables[group_id].block_ids]


def prompt(pool: KVCacheManager, content: str, num_tokens: int) -> Request:
    request = request_of(pool, content, num_tokens)
    request.num_prompt_tokens = num_tokens
    assert pool.admit(request, num_tokens, sequence=STEP)
    return request


@pytest.mark.parametrize(
    ("num_tokens", "use_eagle", "cached"),
    [
        (11, False, [0, 0]),
        (15, False, [0, 0]),
        (16, False, [4, 2]),
        (31, False, [4, 2]),
        (32, False, [8, 4]),
        (15, True, [0, 0]),
        (16, True, [4, 2]),
        (20, True, [5, 2]),
        (24, True, [5, 3]),
        (31, True, [5, 3]),
    ],
)
def test_no_block_is_cached_where_no_hit_can_end_yet(num_tokens: int, cached: list[int], *, use_eagle: bool) -> None:
    """Hits of blocks of 4, 8 and 16 tokens are multiples of 16; with EAGLE they need a block more."""
    specs = [FULL, FullAttentionSpec(8), FullAttentionSpec(16)]
    pool = KVCacheManager(config(80, specs=specs, retention_tokens=0, use_eagle=use_eagle))
    request = request_of(pool, "abcdefghij", 40)
    for step in range(num_tokens):  # cached at once or token by token, and on credit meanwhile
        assert pool.allocate_slots(request, 1, sequence=STEP) is not None
        assert request.num_computed_tokens == step + 1
    assert [sum(hashed(pool, request, group_id)) for group_id in (0, 1)] == cached
    at_once = request_of(pool, "klmnopqrst", 40)
    assert pool.allocate_slots(at_once, num_tokens, sequence=STEP)
    assert [sum(hashed(pool, at_once, group_id)) for group_id in (0, 1)] == cached


def test_tokens_are_on_credit_up_to_the_next_whole_hit() -> None:
    pool = KVCacheManager(config(80, specs=[FULL, FullAttentionSpec(16)], retention_tokens=0))
    request = request_of(pool, "abcdefghij", 40)
    assert pool.allocate_slots(request, 16, num_lookahead_tokens=20, sequence=STEP)
    assert request.credit_tokens == 31


def test_sparse_caching_does_not_change_the_lru_order() -> None:
    pool = KVCacheManager(config(40, specs=[FULL, WINDOW], retention_tokens=0, reuse_order=ReuseOrder.LRU))
    request = prompt(pool, "abcdef", 24)
    table = list(request.tables[1].block_ids)
    pool.free(request)
    assert list(pool.blocks.free_list)[-6:] == table[::-1]


def test_the_second_of_three_requests_caches_the_end_of_a_shared_prefix() -> None:
    """The first request does not know the prefix. The second finds more of it in full attention. The third hits it."""
    pool = KVCacheManager(config(80, specs=[FULL, WINDOW], retention_tokens=0))
    for content, hit, boundary in (("abcdef1", 0, 0), ("abcdef2", 0, 24), ("abcdef3", 24, 0)):
        request = request_of(pool, f"{content}xyz", 40)
        request.num_prompt_tokens = 40
        computed = pool.get_computed_blocks(request)
        assert (computed.num_tokens, computed.shared_prefix_boundary_tokens) == (hit, boundary)
        assert pool.allocate_slots(request, 40 - hit, 0, computed, sequence=STEP)
        pool.free(request)


def test_groups_with_the_same_spec_have_one_shared_prefix_boundary() -> None:
    """A block evicted in one of the groups limits all of them."""
    pool = KVCacheManager(
        config(80, specs=[WINDOW, SlidingWindowSpec(4, sliding_window=17), WINDOW], retention_tokens=0)
    )
    request = prompt(pool, "abcdefgh", 30)
    pool.free(request)
    again = request_of(pool, "abcdefgh", 30)
    hit = pool.get_computed_blocks(again).block_ids
    for lost, lengths in (([], (28, 0)), (hit[1][-1:], (0, 28)), (hit[2][-1:], (0, 0))):
        pool.blocks.evict_blocks(lost)
        found = pool.get_computed_blocks(again)
        assert (found.num_tokens, found.shared_prefix_boundary_tokens) == lengths


def test_a_refused_admission_records_no_shared_prefix_boundary() -> None:
    pool = KVCacheManager(config(16, specs=[FULL, WINDOW], retention_tokens=0))
    pool.free(prompt(pool, "abcde", 20))
    request = request_of(pool, "abc-ef", 24)
    assert prompt(pool, "zz", 8)
    assert pool.admit(request, 24, sequence=STEP) is None
    assert request.shared_prefix_boundary_tokens == 0
    found = pool.find_longest_cache_hit(request)
    assert (found.num_tokens, found.shared_prefix_boundary_tokens) == (0, 12)


def test_events_contain_runs_with_their_parents() -> None:
    pool = KVCacheManager(config(40, specs=[FULL, WINDOW], retention_tokens=16, enable_events=True))
    request = admit(pool, "abcdefghijk", 41)
    stored = [event for event in pool.blocks.take_events() if isinstance(event, BlockStored) and event.group_id == 1]
    assert [event.block_hashes for event in stored] == [
        tuple(request.hashes[2:4]),
        tuple(request.hashes[6:8]),
    ]
    assert [event.parent_block_hash for event in stored] == [request.hashes[1], request.hashes[5]]
    assert [list(event.token_ids) for event in stored] == [list(range(8, 16)), list(range(24, 32))]
    for event in stored:
        for block_hash in event.block_hashes:
            block_id = pool.blocks.prefix_map.first_copy(MapId(WINDOW_GROUP), block_hash)
            assert block_id
            assert pool.blocks.contents
            assert pool.blocks.contents.get(block_id)


def test_a_hit_of_an_earlier_step_keeps_the_boundary_of_its_look_up() -> None:
    world, session = opened(80, specs=[FULL, WINDOW], retention_tokens=0)
    world.admit(session, 1, "abcdef1xyz", 40)
    world.free(session, 1)
    world.declare(session, Operation.LOOKUP, 2, "abcdef2xyz", 40)
    world.allocate(session, 2, 40)
    request = session.requests[next(iter(session.requests))]
    assert (request.num_prompt_tokens, request.shared_prefix_boundary_tokens) == (40, 24)
    assert hashed(world.pool, request) == [block in {4, 5, 7, 8} for block in range(10)]


def test_generated_tokens_are_not_part_of_the_prompt() -> None:
    world, session = opened(80, specs=[FULL, WINDOW], retention_tokens=0)
    world.admit(session, 1, "abcdefghij", 38)
    world.decode(session, 1, "abcdefghij", 2)
    (request,) = session.requests.values()
    assert request.num_prompt_tokens == 38
    assert hashed(world.pool, request) == [block in {7, 8} for block in range(10)]


def test_mamba_needs_all_of_its_states() -> None:
    config(specs=[MambaSpec(4), WINDOW], retention_tokens=0, enable_caching=False).check()
