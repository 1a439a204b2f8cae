"""Rules 1 to 3 of block_pool."""

from array import array
from typing import Any

import pytest

from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvpool.core.ids import BlockHash, BlockId, GroupId, MapId, SessionNumber, StepNumber
from kvpool.core.specs.pool_config import ReuseOrder
from support.core import config


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def pool_of(num_blocks: int, **options: Any) -> BlockPool:
    return BlockPool(config(num_blocks, **options))


def cache(pool: BlockPool, *numbers: int) -> None:
    """Assigns each block a hash derived from its id."""
    hashes = [BlockHash(b"%d" % number) for number in numbers]
    pool.prefix_map.insert(MapId(0), ids(*numbers), hashes, SessionNumber(1), StepNumber(1))
    if pool.contents:
        pool.record_stored(ids(*numbers), BlockStored(tuple(hashes), None, array("I", numbers), 1, None, GroupId(0)))


def test_a_free_block_keeps_its_hash_until_it_is_allocated() -> None:
    pool = pool_of(3)
    pool.get_new_blocks(GroupId(0), 2)
    cache(pool, 1, 2)
    pool.free_blocks(GroupId(0), ids(2, 1))
    assert (pool.prefix_map.block_hash(BlockId(2)), pool.num_evicted) == (b"2", 0)
    assert pool.get_new_blocks(GroupId(0), 1) == [2]
    assert (pool.prefix_map.block_hash(BlockId(2)), pool.num_evicted) == (None, 1)
    assert pool.prefix_map.block_hash(BlockId(1)) == b"1"


@pytest.mark.parametrize(
    ("order", "expected"), [(ReuseOrder.UNCACHED_FIRST, [4, 2, 5, 3, 1]), (ReuseOrder.LRU, [5, 4, 3, 2, 1])]
)
def test_freed_blocks_are_placed_by_the_reuse_order(order: ReuseOrder, expected: list[int]) -> None:
    pool = pool_of(6, reuse_order=order)
    pool.get_new_blocks(GroupId(0), 4)
    cache(pool, 1, 3)
    pool.free_blocks(GroupId(0), ids(4, 3, 2, 1))
    assert list(pool.free_list) == expected


def test_a_reset_needs_every_block_to_be_free() -> None:
    pool = pool_of(4)
    pool.get_new_blocks(GroupId(0), 2)
    cache(pool, 1, 2)
    pool.free_blocks(GroupId(0), ids(2))
    assert not pool.reset_prefix_cache()
    assert len(pool.prefix_map) == 2
    pool.free_blocks(GroupId(0), ids(1))
    before = list(pool.free_list)
    assert pool.reset_prefix_cache()
    assert (len(pool.prefix_map), list(pool.free_list)) == (0, before)


def test_evict_blocks_removes_only_hashes() -> None:
    pool = pool_of(5)
    pool.get_new_blocks(GroupId(0), 3)
    cache(pool, 1, 2)
    pool.free_blocks(GroupId(0), ids(2))
    before = list(pool.free_list)
    pool.evict_blocks(ids(1, 2, 3, 4, 1))
    assert (len(pool.prefix_map), pool.num_evicted) == (0, 0)
    assert (list(pool.free_list), pool.ref_cnt(BlockId(1))) == (before, 1)


def test_each_removed_hash_is_one_event_in_order() -> None:
    pool = pool_of(4, enable_events=True)
    pool.get_new_blocks(GroupId(0), 3)
    cache(pool, 1, 2)
    pool.take_events()
    pool.evict_blocks(ids(3, 1))
    pool.free_blocks(GroupId(0), ids(3, 2, 1))
    pool.get_new_blocks(GroupId(0), 3)
    pool.free_blocks(GroupId(0), ids(1, 2, 3))
    pool.reset_prefix_cache()
    removed = [BlockRemoved(BlockHash(name), GroupId(0)) for name in (b"1", b"2")]
    assert pool.take_events() == [*removed, AllBlocksCleared()]
    assert pool.take_events() == []


@pytest.mark.parametrize("options", [{"enable_events": False}, {"enable_events": True, "enable_caching": False}])
def test_a_pool_without_events_records_none(options: dict[str, bool]) -> None:
    pool = pool_of(3, **options)
    assert pool.reset_prefix_cache()
    assert pool.take_events() == []
