"""Rules of snapshot_cursor: all cached blocks, parents first, regardless of concurrent changes."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.events import BlockRemoved, BlockStored
from kvpool.core.ids import BlockHash, BlockId, GroupId
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from support.core import STEP, admit, config, request_of
from support.router import announced as truth

FULL, WINDOW = FullAttentionSpec(4), SlidingWindowSpec(8, sliding_window=9)


def pool_of(*specs: KVCacheSpec, num_blocks: int = 40, **options: Any) -> KVCacheManager:
    return KVCacheManager(config(num_blocks, specs=specs or (FULL,), enable_events=True, **options))


def chunks(walk: SnapshotCursor, max_blocks: int = 3) -> list[list[BlockStored]]:
    told = []
    while not walk.is_done:
        told.append(walk.next_chunk(max_blocks))
    return told


def runs(pool: KVCacheManager, max_blocks: int = 3) -> list[BlockStored]:
    return [run for chunk in chunks(SnapshotCursor(pool), max_blocks) for run in chunk]


def told(stored: Sequence[BlockStored]) -> set[tuple[GroupId, BlockHash]]:
    return {(run.group_id, block_hash) for run in stored for block_hash in run.block_hashes}


def test_a_snapshot_in_one_chunk_equals_the_events() -> None:
    pool = pool_of()
    request = request_of(pool, "abc", 14)
    request.lora_name = "adapter"
    assert pool.admit(request, 14, sequence=STEP)
    assert runs(pool, 40) == pool.blocks.take_events()


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)])
def test_every_cached_block_is_in_a_chunk_of_bounded_size(specs: tuple[KVCacheSpec, ...]) -> None:
    pool = pool_of(*specs)
    for content in ("abcdef", "abxy", "q"):
        pool.free(admit(pool, content, 25))
    told_chunks = chunks(SnapshotCursor(pool))
    assert told([run for chunk in told_chunks for run in chunk]) == truth(pool) != set()
    per_block = max(spec.block_size for spec in specs) // FULL.block_size
    assert max(sum(len(run.block_hashes) for run in chunk) for chunk in told_chunks) <= 3 * per_block
    for chunk in told_chunks:
        assert all(len(run.token_ids) == len(run.block_hashes) * run.block_size for run in chunk)


def test_parents_precede_children_even_if_their_block_ids_are_higher() -> None:
    """Tables are freed last block first, so the blocks of the next request have descending ids."""
    pool = pool_of(num_blocks=12)
    pool.free(admit(pool, "zzzzzzzzzz", 40))
    pool.free(admit(pool, "abcdefgh", 34))
    known: set[BlockHash] = set()
    for run in runs(pool):
        assert run.parent_block_hash is None or run.parent_block_hash in known
        known.update(run.block_hashes)
    assert len(known) == len(truth(pool))


def test_blocks_evicted_or_cached_during_a_snapshot_appear_in_events() -> None:
    pool = pool_of(num_blocks=20)
    old = admit(pool, "abcdefghij", 40)
    walk = SnapshotCursor(pool)
    known = told(walk.next_chunk(3))
    pool.blocks.take_events()
    pool.blocks.evict_blocks([BlockId(2), BlockId(7)])
    pool.free(old)
    admit(pool, "xy", 8)
    for event in pool.blocks.take_events():
        match event:
            case BlockStored():
                known |= told([event])
            case BlockRemoved(copies_left=0):
                known.discard((event.group_id, event.block_hash))
    while not walk.is_done:
        known |= told(walk.next_chunk(3))
    assert known == truth(pool)


def test_a_snapshot_ends_with_its_epoch() -> None:
    pool = pool_of()
    admit(pool, "abcdef", 24)
    walk = SnapshotCursor(pool)
    walk.next_chunk(1)
    pool.begin_epoch(pool.config, 2)
    assert walk.is_done


def test_a_pool_without_events_keeps_no_contents() -> None:
    assert KVCacheManager(config()).blocks.contents is None
