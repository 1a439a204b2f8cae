"""Rules of group_manager and kv_cache_manager, with one group that keeps every token."""

from typing import Any

import pytest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName
from kvpool.core.specs.pool_config import PoolConfig
from support.core import BLOCK_SIZE, STEP, admit, config, request_of


def pool_of(num_blocks: int = 20, **options: Any) -> KVCacheManager:
    return KVCacheManager(config(num_blocks, **options))


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, []), (4, []), (5, [1]), (8, [1]), (9, [1, 2]), (40, [1, 2, 3])])
def test_a_hit_leaves_a_token_to_compute(num_tokens: int, hit: list[int]) -> None:
    pool = pool_of()
    admit(pool, "abc", 13)
    computed = pool.find_longest_cache_hit(request_of(pool, "abcdefghij", num_tokens))
    assert (list(computed.block_ids[0]), computed.num_tokens) == (hit, len(hit) * BLOCK_SIZE)


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


def test_a_preempted_request_starts_over_and_finds_its_own_blocks() -> None:
    pool = pool_of()
    request = admit(pool, "abc", 13)
    pool.preempt(request)
    assert (request.holds_blocks, request.num_computed_tokens) == (False, 0)
    assert (request.num_preemptions, pool.num_preemptions) == (1, 1)
    assert pool.find_longest_cache_hit(request).num_tokens == 12
