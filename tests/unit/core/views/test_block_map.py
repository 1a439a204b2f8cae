"""The map of a pool's blocks against the states of the single blocks."""

import pytest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import EndReason, EndSession
from kvpool.core.ids import BlockId, SessionNumber
from kvpool.core.views.block_map import BlockMap, BlockMapScan
from kvpool.core.views.inspection import BlockState, state_of
from support.core import STEP, World, admit, config, opened

HELD, PENDING, CACHED = "held", "pending", "cached"


def map_of(pool: KVCacheManager, **bounds: int) -> BlockMap:
    scan = BlockMapScan(pool, **bounds)
    while scan.advance():
        pass
    return scan.result


def states_of(pool: KVCacheManager) -> list[str]:
    """The state of each block, in order, by inspection of one block after the other."""
    by_state = {BlockState.USED: HELD, BlockState.CACHED: CACHED, BlockState.FREE: ""}
    pending = pool.blocks.prefix_map.pending.steps
    return [
        PENDING if block_id in pending and pool.blocks.ref_cnt(block_id) else by_state[state_of(pool, block_id)]
        for block_id in map(BlockId, range(1, pool.blocks.num_blocks))
    ]


def pool_in_all_states(num_blocks: int = 60) -> KVCacheManager:
    """A pool with held, pending, cached and empty blocks."""
    pool = KVCacheManager(config(num_blocks))
    admit(pool, "aaaaaaaa", 30)
    freed = admit(pool, "bbbbb", 20)
    pool.blocks.prefix_map.pending.publish(SessionNumber(1), STEP)
    admit(pool, "cccc", 16)
    pool.free(freed)
    return pool


@pytest.mark.parametrize("max_cells", [1, 7, 59, 1024])
def test_a_map_counts_every_block_once(max_cells: int) -> None:
    pool = pool_in_all_states()
    states, found = states_of(pool), map_of(pool, max_cells=max_cells)
    assert not found.is_sampled
    size = found.blocks_per_cell
    assert len(found.cached) == -(-59 // size) <= max_cells
    cells = [states[first : first + size] for first in range(0, 59, size)]
    assert found.in_use == [cell.count(HELD) for cell in cells]
    assert found.pending == [cell.count(PENDING) for cell in cells]
    assert found.cached == [cell.count(CACHED) for cell in cells]
    assert found.quarantined == [0] * len(cells)
    assert all(states.count(state) for state in (HELD, PENDING, CACHED, ""))


def test_blocks_of_an_ended_session_are_in_quarantine() -> None:
    world, session = opened(40)
    world.admit(session, 1, "aaaa", 16)
    held = map_of(world.pool, max_cells=4).in_use
    pending = map_of(world.pool, max_cells=4).pending
    world.allocator.execute(EndSession(session.session_id, EndReason.SESSION_EVICTED, 30.0), world.now_seconds)
    found = map_of(world.pool, max_cells=4)
    assert sum(found.quarantined) == world.pool.quarantine.num_blocks > 0
    assert found.quarantined == [a + b for a, b in zip(held, pending, strict=True)]
    assert sum(found.in_use) + sum(found.pending) == 0


def test_a_cell_names_the_session_that_filled_most_of_it_and_when_its_blocks_are_reused() -> None:
    pool = KVCacheManager(config(60))
    first, second = admit(pool, "aaaaaaaa", 32), admit(pool, "bbbb", 16)
    pool.free(second)
    pool.free(first)
    found = map_of(pool, max_cells=15)
    assert found.sessions == [1, 1, 1] + [0] * 12
    assert found.reuse_percent == [86, 50, 14] + [-1] * 12, "blocks 9 to 12 first, then 8 to 1"


def test_the_order_of_reuse_is_that_of_the_free_list() -> None:
    pool = KVCacheManager(config(4000))
    for number in range(60):
        request = admit(pool, f"{number:02d}" + "x" * 48, 200)
        if number % 3:
            pool.free(request)
    order = [block_id for block_id in pool.blocks.free_list if pool.blocks.block_hash(block_id)]
    sampled = pool.blocks.free_list.sampled_order(100)
    assert pool.blocks.free_list.sampled_order(10_000) == order
    assert sampled == [block_id for block_id in order if block_id in set(sampled)]
    assert 20 <= len(sampled) <= 101


def test_a_map_of_a_large_pool_is_estimated_from_some_of_its_blocks() -> None:
    pool = KVCacheManager(config(4001))
    for number in range(100):
        request = admit(pool, f"{number:02d}" + "x" * 18, 80)
        if number % 2:
            pool.free(request)
    exact, found = map_of(pool, max_cells=20), map_of(pool, max_cells=20, max_sampled_blocks=1000)
    assert (exact.is_sampled, found.is_sampled) == (False, True)
    assert sum(found.pending) == pytest.approx(sum(exact.pending), rel=0.1)
    assert sum(found.cached) == pytest.approx(sum(exact.cached), rel=0.1)


def test_a_scan_reads_a_few_cells_at_a_time_and_ends_with_the_epoch() -> None:
    world = World(2000)
    scan = BlockMapScan(world.pool, max_cells=1000)
    assert scan.advance()
    assert 0 < len(scan.result.cached) < 1000
    world.pool.blocks = KVCacheManager(config(2000)).blocks
    assert not scan.advance()
