"""Rules 1 and 2 of block_lifetimes, alone and in a pool."""

import random

from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.ids import BlockHash, BlockId, GroupId, MapId, SessionNumber, StepNumber
from kvpool.core.statistics import Histogram
from support.core import World, config
from support.state import DrivenState


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def sample_all() -> BlockLifetimes:
    return BlockLifetimes(1, lambda _: 0)


def measured(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), round(histogram.total, 6)


def test_lifetime_starts_at_allocation_and_idle_time_at_the_last_access() -> None:
    kept = sample_all()
    kept.now_seconds = 10.0
    kept.record_taken(ids(1, 2))
    kept.now_seconds = 13.0
    kept.record_accessed(ids(2, 3))
    kept.now_seconds = 20.0
    kept.record_accessed(ids(2))
    kept.now_seconds = 21.5
    kept.record_evicted(ids(2))
    assert measured(kept.reuse_gap) == (2, 3.0 + 7.0)
    assert measured(kept.lifetime) == (1, 11.5)
    assert measured(kept.idle) == (1, 1.5)
    assert list(kept.sampled) == [1]


def test_a_block_that_is_taken_again_restarts_without_an_eviction() -> None:
    kept = sample_all()
    kept.record_taken(ids(1))
    kept.now_seconds = 5.0
    kept.record_taken(ids(1))
    kept.now_seconds = 6.0
    kept.record_evicted(ids(1))
    assert measured(kept.lifetime) == (1, 1.0)


def test_the_sample_is_independent_of_the_size_of_allocations() -> None:
    for batch in (1, 7, 1000):
        kept = BlockLifetimes(100, random.Random(1).randrange)  # noqa: S311 - which blocks are followed
        for start in range(0, 100_000, batch):
            kept.record_taken([BlockId(i) for i in range(start, min(start + batch, 100_000))])
        assert 900 < len(kept.sampled) < 1100
        if batch == 1:
            first = sorted(kept.sampled)
        assert sorted(kept.sampled) == first


def test_a_pool_records_evictions_of_sampled_blocks_and_clears_them_on_reset() -> None:
    kept = sample_all()
    pool = BlockPool(config(4), kept)
    pool.get_new_blocks(GroupId(0), 2)
    pool.prefix_map.insert(MapId(0), ids(1, 2), [BlockHash(b"1"), BlockHash(b"2")], SessionNumber(1), StepNumber(1))
    pool.free_blocks(GroupId(0), ids(2, 1))
    kept.now_seconds = 4.0
    assert pool.get_new_blocks(GroupId(0), 2) == [3, 2]
    assert measured(kept.lifetime) == (1, 4.0)
    pool.free_blocks(GroupId(0), ids(3, 2))
    assert pool.reset_prefix_cache()
    assert not kept.sampled


def test_the_time_of_a_step_is_the_time_of_its_call() -> None:
    kept = sample_all()
    world = World(3, DrivenState(lambda: kept))
    session = world.open(lease_seconds=60.0)
    for number, content, at_seconds in ((1, "ab", 7.0), (2, "xy", 9.0)):
        world.allocator.touch_session(session.session_id, at_seconds)
        world.admit(session, number, content, 8)
        world.free(session, number)
    assert world.pool.blocks.num_evicted == 2
    assert measured(kept.lifetime) == (2, 2 * 2.0)


def test_a_new_epoch_records_no_evictions() -> None:
    kept = sample_all()
    world = World(6, DrivenState(lambda: kept))
    world.admit(world.open(), 1, "abc", 12)
    world.allocator.pass_epoch(world.pool, 2)
    assert (measured(kept.lifetime), kept.sampled) == ((0, 0.0), {})
    assert world.pool.blocks.block_lifetimes is kept
