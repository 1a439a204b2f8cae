"""A cursor over all cached blocks of a pool, with their contents, that can be read in parts while the pool changes.

1. The cursor takes turns with changes. Read all chunks first, then all events since the cursor began: the result is the
   prefix map, of all namespaces together. A hash's last event gives its current state; a hash without an event is
   unchanged.
2. A parent comes before its children, if the same group caches it: in an earlier chunk, or in an event.
3. The chunks are read in the event loop. A copy of a million entries at once would stop the server for 33 ms; a thread
   would hold the interpreter's lock for the same work, and release it later.
"""

from array import array
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.events import TOKEN_ID_BYTES, BlockStored, packed_token_ids
from kvpool.core.ids import BlockHash, BlockId, GroupId

_SCANNED_PER_REPORTED: Final = 8


class SnapshotCursor:
    """One walk over the cached blocks of a pool that makes events. Uses one byte of memory per block."""

    def __init__(self, pool: KVCacheManager) -> None:
        self._pool = pool
        self._blocks = pool.blocks
        self._seen = bytearray(pool.blocks.num_blocks)
        self._next = 1
        self._chain: list[BlockId] = []  # blocks to report next, in reverse order

    @property
    def is_done(self) -> bool:
        """Whether all blocks were reported, or were dropped with an epoch, which an event reported."""
        is_at_end = not self._chain and self._next >= self._blocks.free_list.num_columns
        return is_at_end or self._pool.blocks is not self._blocks

    def next_chunk(self, max_blocks: int) -> list[BlockStored]:
        """Reads the next blocks in their current state.

        Args:
            max_blocks: Maximum number of blocks to return; up to 8 times as many are scanned.

        Returns:
            Runs of consecutive blocks of a prefix; may be empty.
        """
        reported: list[BlockId] = []
        end = min(self._next + _SCANNED_PER_REPORTED * max_blocks, self._blocks.free_list.num_columns)
        while len(reported) < max_blocks and (self._chain or self._next < end):
            if self._chain:
                reported.append(self._chain.pop())
            else:
                self._climb(BlockId(self._next))
                self._next += 1
        return [run.stored() for run in self._runs(reported)]

    def _climb(self, block_id: BlockId) -> None:
        """Adds a block and its ancestors to the chain, up to the first that was already added."""
        contents, prefix_map = self._blocks.contents, self._blocks.prefix_map
        at: BlockId | None = block_id
        while at is not None and not self._seen[at] and contents and (held := contents.get(at)):
            self._seen[at] = True
            self._chain.append(at)
            (parent, *_) = contents.further[at][-1][1] if at in contents.further else held  # of its first hash block
            at = None if parent is None else prefix_map.first_copy(prefix_map.map_id(at), parent)

    def _runs(self, block_ids: list[BlockId]) -> "list[_Run]":
        contents, prefix_map = self._blocks.contents, self._blocks.prefix_map
        lookahead_bytes = self._pool.config.hash_scheme.num_lookahead_tokens * TOKEN_ID_BYTES
        runs: list[_Run] = []
        for block_id in block_ids:
            block_hash, held = prefix_map.block_hash(block_id), contents.get(block_id) if contents else None
            if block_hash is None or held is None:  # evicted since it was added to the chain
                continue
            group_id = prefix_map.group_id(block_id)
            further = contents.further.get(block_id, ()) if contents else ()
            for each_hash, (parent, packed, lora_name) in (*reversed(further), (block_hash, held)):
                key = (parent, group_id, lora_name, len(packed))
                last = runs[-1] if runs else None
                if last is None or key != (last.hashes[-1], last.group_id, last.lora_name, last.size_bytes):
                    last = _Run(group_id, parent, lora_name, len(packed))
                    runs.append(last)
                last.hashes.append(each_hash)
                end = len(packed) - lookahead_bytes
                last.token_ids.frombytes(packed[:end])
                last.lookahead_token_ids.frombytes(packed[end:])
        return runs


@dataclass(slots=True)
class _Run:
    """Consecutive blocks of one prefix, each with `size_bytes` of token ids."""

    group_id: GroupId
    parent: BlockHash | None
    lora_name: str | None
    size_bytes: int
    hashes: list[BlockHash] = field(default_factory=list)
    token_ids: "array[int]" = field(default_factory=lambda: packed_token_ids(()))
    lookahead_token_ids: "array[int]" = field(default_factory=lambda: packed_token_ids(()))

    def stored(self) -> BlockStored:
        """The run as an event."""
        block_size = len(self.token_ids) // len(self.hashes)
        return BlockStored(
            tuple(self.hashes),
            self.parent,
            self.token_ids,
            block_size,
            self.lora_name,
            self.group_id,
            self.lookahead_token_ids,
        )
