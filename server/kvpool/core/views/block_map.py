"""A map of the blocks of a pool's first tier in at most `MAX_CELLS` cells, each a run of blocks. Read-only.

1. The work for a map is bounded: of a large pool, each cell is estimated from some of its blocks, evenly spaced. The
   exact sums are in `PoolInfo`.
2. A map is read in pieces, between which the pool may change. A piece takes about 0.2 ms.
3. A block is in one state: in quarantine, else pending, else in use, else cached, else empty.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from operator import floordiv
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager

MAX_CELLS: Final = 1024
MAX_SAMPLED_BLOCKS: Final = 2**14
MAX_SAMPLED_QUARANTINED: Final = 2**13
_SAMPLED_ORDER: Final = 2**12
_CELLS_PER_PIECE: Final = 32
_SAMPLED_PER_CELL: Final = 8
"""Blocks of a cell that its session is taken from."""


@dataclass(slots=True)
class BlockMap:
    """The map. All lists are by cell; counts of blocks are estimates if `is_sampled`.

    Attributes:
        blocks_per_cell: Number of blocks of each cell; the last one may have fewer. The first block is block 1.
        is_sampled: Whether only some of the blocks were read.
        in_use: Blocks that requests hold, without those of the next two lists, or that are reserved for sinks.
        pending: Held blocks that only the session that fills them can hit, because their step has not been executed.
        quarantined: Blocks of ended sessions whose last step may still run.
        cached: Free blocks with contents that can be hit.
        sessions: Number of the session that filled most of the blocks with contents; 0 if none has.
        reuse_percent: Place of its cached blocks in the order in which free blocks are reused, on average: from 0 for
            those that became free first and are evicted next, to 100; -1 for none.
    """

    blocks_per_cell: int
    is_sampled: bool
    in_use: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    quarantined: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    sessions: list[int] = field(default_factory=list)
    reuse_percent: list[int] = field(default_factory=list)


class BlockMapScan:
    """Makes a map: call `advance` until it returns False.

    Attributes:
        result: The map. Complete when `advance` has returned False, unless an epoch has passed meanwhile.
    """

    def __init__(
        self, pool: KVCacheManager, max_cells: int = MAX_CELLS, max_sampled_blocks: int = MAX_SAMPLED_BLOCKS
    ) -> None:
        self._pool = pool
        self._blocks = pool.blocks
        num_usable = self._blocks.num_blocks - 1
        per_cell = max(-(-num_usable // max_cells), 1)
        step = max(-(-num_usable // max_sampled_blocks), 1)
        self._step = step if step == 1 else step | 1  # a power of two would meet the same group or table each time
        self.result = BlockMap(per_cell, step > 1)
        self._quarantined = _quarantined_by_cell(pool, per_cell)
        self._places = _places_by_cell(pool, per_cell)
        self._next = 1

    def advance(self) -> bool:
        """Reads the next cells. Returns whether some are missing."""
        if self._pool.blocks is not self._blocks:
            return False
        num_blocks, per_cell = self._blocks.num_blocks, self.result.blocks_per_cell
        end = min(self._next + _CELLS_PER_PIECE * per_cell, num_blocks)
        for first in range(self._next, end, per_cell):
            self._add_cell(first, min(first + per_cell, num_blocks))
        self._next = end
        return end < num_blocks

    def _add_cell(self, first: int, end: int) -> None:
        blocks, result = self._blocks, self.result
        cell = (first - 1) // result.blocks_per_cell
        sampled = slice(first, end, self._step)
        column = blocks.free_list.entries(sampled)
        hashes = blocks.prefix_map.hashes(sampled)
        pending = blocks.prefix_map.pending.steps
        num_held = [count > 0 for count in column].count(True)
        num_cached = [count <= 0 and each is not None for count, each in zip(column, hashes, strict=True)].count(True)
        num_pending = 0
        if pending and num_held:
            ids = range(first, end, self._step)
            num_pending = [count > 0 and i in pending for count, i in zip(column, ids, strict=False)].count(True)
        size, num_sampled = end - first, len(range(first, end, self._step))
        held = num_held * size // num_sampled
        quarantined = min(self._quarantined[cell], held)
        pending_blocks = min(num_pending * size // num_sampled, held - quarantined)
        result.quarantined.append(quarantined)
        result.pending.append(pending_blocks)
        result.in_use.append(held - quarantined - pending_blocks)
        result.cached.append(num_cached * size // num_sampled)
        skipped = max(len(column) // _SAMPLED_PER_CELL, 1)
        writers = blocks.prefix_map.writers(slice(first, end, self._step * skipped))
        filled = [writer for each, writer in zip(hashes[::skipped], writers, strict=True) if each is not None]
        result.sessions.append(max(filled, key=filled.count) if filled else 0)
        result.reuse_percent.append(self._places.get(cell, -1))


def _places_by_cell(pool: KVCacheManager, per_cell: int) -> dict[int, int]:
    """Average place of the cached blocks of each cell in the order of their reuse, in percent."""
    order = pool.blocks.prefix_map.hashed_among(pool.blocks.free_list.sampled_order(_SAMPLED_ORDER))
    places: dict[int, list[int]] = {}
    for place, block_id in enumerate(order):
        places.setdefault((block_id - 1) // per_cell, []).append(place)
    last = max(len(order) - 1, 1)
    return {cell: round(100 * sum(each) / len(each) / last) for cell, each in places.items()}


def _quarantined_by_cell(pool: KVCacheManager, per_cell: int) -> Counter[int]:
    """Blocks in quarantine by cell; estimated from some of them if there are many."""
    requests = (request for each in pool.quarantine for request in each.session.requests.values())
    tables = [table for request in islice(requests, MAX_SAMPLED_QUARANTINED) for table in request.tables]
    step = -(-sum(table.num_held for table in tables) // MAX_SAMPLED_QUARANTINED)
    if not step:
        return Counter()
    ids = set(chain.from_iterable(table.block_ids[table.num_skipped :: step] for table in tables))
    found = Counter(map(floordiv, [block_id - 1 for block_id in ids if block_id], repeat(per_cell)))
    return Counter({cell: count * step for cell, count in found.items()})
