"""A cursor over all cached blocks of a pool, with their contents, that can be read in parts while the pool changes.

1. The cursor takes turns with changes. Read all chunks first, then all events since the cursor began: the result is the
   prefix map. A hash's last event gives its current state; a hash without an event is unchanged.
2. A parent comes before its children, if it is cached: in an earlier chunk, or in an event.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.events import BlockStored, packed_token_ids
from kvpool.core.ids import BlockHash, BlockId, GroupId

_SCANNED_PER_REPORTED: Final = 8


class SnapshotCursor:
    """One walk over the cached blocks of a pool that makes events. Takes a byte a block of memory."""

    def __init__(self, pool: KVCacheManager) -> None:
        self._pool = pool
        self._blocks = pool.blocks
        self._seen = bytearray(pool.blocks.num_blocks)
        self._next = 1
        self._chain: list[BlockId] = []  # blocks that are to be told next, from the last to the first

    @property
    def is_done(self) -> bool:
        """Whether all blocks were looked at and reported, or are all gone, as an event said."""
        is_at_end = not self._chain and self._next >= len(self._seen)
        return is_at_end or self._pool.blocks is not self._blocks

    def next_chunk(self, max_blocks: int) -> list[BlockStored]:
        """Looks at the next blocks, as they are now.

        Args:
            max_blocks: How many to tell of at most; several times as many may be looked at.

        Returns:
            Runs of what they hold, perhaps none.
        """
        reported: list[BlockId] = []
        end = min(self._next + _SCANNED_PER_REPORTED * max_blocks, len(self._seen))
        while len(reported) < max_blocks and (self._chain or self._next < end):
            if self._chain:
                reported.append(self._chain.pop())
            else:
                self._climb(BlockId(self._next))
                self._next += 1
        return [run.stored() for run in self._runs(reported)]

    def _climb(self, block_id: BlockId) -> None:
        """Puts on the chain the block and those that lead to it, up to one that was told already."""
        contents, prefix_map = self._blocks.contents, self._blocks.prefix_map
        at: BlockId | None = block_id
        while at is not None and not self._seen[at] and contents and (held := contents.get(at)):
            self._seen[at] = True
            self._chain.append(at)
            at = None if held[0] is None else prefix_map.first_copy(prefix_map.group_id(at), held[0])

    def _runs(self, block_ids: list[BlockId]) -> Iterator["_Run"]:
        contents, prefix_map = self._blocks.contents, self._blocks.prefix_map
        run: _Run | None = None
        for block_id in block_ids:
            block_hash, held = prefix_map.block_hash(block_id), contents.get(block_id) if contents else None
            if block_hash is None or held is None:  # lost since it was put on the chain
                continue
            parent, packed, lora_name = held
            group_id = prefix_map.group_id(block_id)
            if run is None or (parent, group_id, lora_name) != (run.hashes[-1], run.group_id, run.lora_name):
                if run:
                    yield run
                run = _Run(group_id, parent, lora_name)
            run.hashes.append(block_hash)
            run.token_ids.frombytes(packed)
        if run:
            yield run


@dataclass(slots=True)
class _Run:
    """Consecutive blocks of one prefix."""

    group_id: GroupId
    parent: BlockHash | None
    lora_name: str | None
    hashes: list[BlockHash] = field(default_factory=list)
    token_ids: "array[int]" = field(default_factory=lambda: packed_token_ids(()))

    def stored(self) -> BlockStored:
        """The run as an event."""
        block_size = len(self.token_ids) // len(self.hashes)
        return BlockStored(tuple(self.hashes), self.parent, self.token_ids, block_size, self.lora_name, self.group_id)
