"""Rules of group_manager and kv_cache_manager, with one group that keeps every token."""

from typing import Any

import pytest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.events import BlockStored
from kvpool.core.ids import PoolName
from kvpool.core.specs.kinds import MLAAttentionSpec
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig
from support.core import BLOCK_SIZE, STEP, admit, config, request_of


def pool_of(num_blocks: int = 20, **options: Any) -> KVCacheManager:
    return KVCacheManager(config(num_blocks, **options))


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, []), (4, []), (5, [1]), (8, [1]), (9, [1, 2]), (40, [1, 2, 3])])
def test_a_hit_leaves_a_token_to_compute(num_tokens: int, hit: list[int]) -> None:
    pool = pool_of()
    admit(pool, "abc", 13)
    computed = pool.find_longest_cache_hit(request_of(pool, "abcdefghij", num_tokens))
    assert (list(computed.block_ids[0]), computed.num_tokens) == (hit, len(hit) * BLOCK_SIZE)


@pytest.mark.parametrize(("num_tokens", "hit"), [(5, []), (9, [1]), (40, [1, 2])])
def test_eagle_drops_the_last_block_of_a_hit(num_tokens: int, hit: list[int]) -> None:
    pool = pool_of(use_eagle=True)
    admit(pool, "abc", 13)
    assert pool.find_longest_cache_hit(request_of(pool, "abcdefghij", num_tokens)).block_ids == (hit,)


def test_nothing_is_found_without_caching() -> None:
    pool = pool_of(enable_caching=False)
    admit(pool, "abc", 13)
    computed = pool.get_computed_blocks(request_of(pool, "abc", 13))
    assert (computed.block_ids, computed.num_tokens) == (((),), 0)
    assert (len(pool.blocks.prefix_map), pool.stats.requests) == (0, 0)


def test_a_new_block_is_allocated_when_the_last_one_is_full() -> None:
    pool = pool_of()
    request = admit(pool, "a", 6)
    answers = [pool.allocate_slots(request, 1, sequence=STEP) for _ in range(4)]
    assert answers == [((),), ((),), ([3],), ((),)]


def test_lookahead_slots_are_used_by_later_tokens() -> None:
    pool = pool_of()
    request = request_of(pool, "a", 6)
    assert pool.allocate_slots(request, 6, 4, sequence=STEP) == ([1, 2, 3],)
    assert request.num_computed_tokens == 6
    assert pool.allocate_slots(request, 6, sequence=STEP) == ((),)


def test_lookahead_ends_at_max_model_len() -> None:
    pool = KVCacheManager(PoolConfig(PoolName("p"), 20, 10, config().groups))
    assert pool.allocate_slots(request_of(pool, "ab", 9), 9, 10, sequence=STEP) == ([1, 2, 3],)


def test_too_few_blocks_is_a_result_that_changes_nothing() -> None:
    pool = pool_of(4)
    admit(pool, "a", 5)
    request = request_of(pool, "xyz", 8)
    before = (list(pool.blocks.free_list), repr(pool))
    assert pool.allocate_slots(request, 8, sequence=STEP) is None
    assert pool.admit(request, 8, sequence=STEP) is None
    assert (list(pool.blocks.free_list), repr(pool)) == before
    assert (request.holds_blocks, request.num_computed_tokens, pool.stats.requests) == (False, 0, 1)


def test_free_blocks_of_a_hit_count_as_taken() -> None:
    pool = pool_of(4)  # three usable blocks
    pool.free(admit(pool, "abc", 12))
    request = request_of(pool, "abx", 13)
    assert pool.find_longest_cache_hit(request).num_tokens == 8
    assert pool.admit(request, 13, sequence=STEP) is None  # two blocks of the hit and two new ones
    assert pool.admit(request, 4, sequence=STEP)
    assert request.tables[0].block_ids == [1, 2, 3]


def test_a_hit_is_shared_and_later_blocks_are_not() -> None:
    pool = pool_of()
    one, two = admit(pool, "abc", 13), admit(pool, "abX", 13)
    assert (one.tables[0].block_ids, two.tables[0].block_ids) == ([1, 2, 3, 4], [1, 2, 5, 6])
    assert [pool.blocks.ref_cnt(block_id) for block_id in two.tables[0].block_ids] == [2, 2, 1, 1]


def test_drafts_get_slots_but_are_never_cached() -> None:
    pool = pool_of()
    request = request_of(pool, "a", 6)
    pool.allocate_slots(request, 10, sequence=STEP)
    assert (len(request.tables[0].block_ids), len(pool.blocks.prefix_map)) == (3, 1)


def test_a_table_is_freed_from_its_tail() -> None:
    pool = pool_of(6)
    pool.free(admit(pool, "abcde", 20))
    assert list(pool.blocks.free_list) == [5, 4, 3, 2, 1]


def test_a_preempted_request_starts_over_and_finds_its_own_blocks() -> None:
    pool = pool_of()
    request = admit(pool, "abc", 13)
    pool.preempt(request)
    assert (request.holds_blocks, request.num_computed_tokens) == (False, 0)
    assert (request.num_preemptions, pool.num_preemptions) == (1, 1)
    assert pool.find_longest_cache_hit(request).num_tokens == 12


def test_context_parallelism_multiplies_the_tokens_per_block() -> None:
    pool = pool_of(dcp_world_size=2)
    request = admit(pool, "ab", 17)
    assert request.tables[0].block_ids == [1, 2, 3]
    assert pool.find_longest_cache_hit(request_of(pool, "ab", 17)).num_tokens == 16


def test_latent_attention_is_managed_as_full_attention() -> None:
    pool = KVCacheManager(PoolConfig(PoolName("p"), 9, 64, (KVCacheGroup(MLAAttentionSpec(4, head_size=576)),)))
    admit(pool, "ab", 9)
    assert pool.find_longest_cache_hit(request_of(pool, "ab", 9)).block_ids == ([1, 2],)


@pytest.mark.parametrize(("others", "expected"), [([], 4), (["abc"], 3), (["abc", "aXc"], 1), (["Xbc"], 0)])
def test_the_common_prefix_is_shared_by_all_tables(others: list[str], expected: int) -> None:
    pool = pool_of(40)
    request = admit(pool, "abc", 13)
    running = [admit(pool, content, 13) for content in others]
    assert pool.get_num_common_prefix_blocks(request, [request, *running]) == (expected,)


def test_stored_events_chain_through_the_parents_hash() -> None:
    pool = pool_of(enable_events=True)
    request = request_of(pool, "abc", 13)
    pool.allocate_slots(request, 9, sequence=STEP)
    pool.allocate_slots(request, 4, sequence=STEP)
    first, second = pool.blocks.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_block_hash, first.block_hashes) == (None, tuple(request.hashes[:2]))
    assert (second.parent_block_hash, second.block_hashes) == (request.hashes[1], tuple(request.hashes[2:]))
    assert (list(first.token_ids), list(second.token_ids)) == (list(range(8)), list(range(8, 12)))


def test_blocks_whose_end_is_computed_again_are_not_cached_yet() -> None:
    pool = pool_of(num_reprefillable_tokens=2)
    request = admit(pool, "ab", 8)
    assert len(pool.blocks.prefix_map) == 1
    request.num_tokens = 10
    assert pool.allocate_slots(request, 1, sequence=STEP)
    assert len(pool.blocks.prefix_map) == 1
    assert pool.allocate_slots(request, 1, sequence=STEP)
    assert len(pool.blocks.prefix_map) == 2
