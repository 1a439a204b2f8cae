"""A cursor over all cached blocks of a pool, with their contents, that can be read in parts while the pool changes.

1. The cursor takes turns with changes. Read all chunks first, then all events since the cursor began: the result is the
   announced part of the prefix map, of all namespaces together. The last event of a hash in a tier gives its current
   state; without an event it is unchanged.
2. A parent comes before its children, if the same group caches it, in either tier: in an earlier chunk, or in an
   event.
3. The chunks are read in the event loop. A copy of a million entries at once would stop the server for 33 ms; a thread
   would hold the interpreter's lock for the same work, and release it later.
"""

from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.events import BlockStored
from kvpool.core.ids import BlockId

_SCANNED_PER_REPORTED: Final = 8


class SnapshotCursor:
    """One walk over the cached blocks of a pool that makes events. Uses one byte of memory per block."""

    def __init__(self, pool: KVCacheManager) -> None:
        self._pool = pool
        self._blocks = pool.blocks
        self._seen = bytearray(pool.config.num_ids)
        self._next = 1
        self._chain: list[BlockId] = []  # blocks to report next, in reverse order

    @property
    def is_done(self) -> bool:
        """Whether all blocks were reported, or were dropped with an epoch, which an event reported."""
        is_at_end = not self._chain and self._next >= self._blocks.prefix_map.num_columns
        return is_at_end or self._pool.blocks is not self._blocks

    def next_chunk(self, max_blocks: int) -> list[BlockStored]:
        """Reads the next blocks in their current state.

        Args:
            max_blocks: Maximum number of blocks to return; up to 8 times as many are scanned.

        Returns:
            Runs of consecutive blocks of a prefix; may be empty.
        """
        reported: list[BlockId] = []
        end = min(self._next + _SCANNED_PER_REPORTED * max_blocks, self._blocks.prefix_map.num_columns)
        while len(reported) < max_blocks and (self._chain or self._next < end):
            if self._chain:
                reported.append(self._chain.pop())
            else:
                self._climb(BlockId(self._next))
                self._next += 1
        contents = self._blocks.contents
        return contents.stored(reported) if contents else []  # without those evicted since they were added to the chain

    def _climb(self, block_id: BlockId) -> None:
        """Adds a block and its ancestors to the chain, up to the first that was already added."""
        contents, prefix_map = self._blocks.contents, self._blocks.prefix_map
        at: BlockId | None = block_id
        while at is not None and not self._seen[at] and contents and (held := contents.get(at)):
            self._seen[at] = True
            self._chain.append(at)
            (parent, *_) = contents.further[at][-1][1] if at in contents.further else held  # of its first hash block
            at = None if parent is None else prefix_map.first_copy(prefix_map.map_id(at), parent)
