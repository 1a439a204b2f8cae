"""What each cached block was stored with, and a walk over all of it that need not be done at once.

1. A block has contents exactly when it has a hash, in a pool that makes events.
2. A walk takes turns with changes. Its chunks and the events, each in the order in which they came to be, add up to the
   map: what was cached before the walk and still is, the walk comes by; all else, the events tell. So do all its chunks
   first, then all events since it began: a hash's last event says how it is now, and one without events is unchanged.
3. A parent is told before its children, if it is cached: earlier in the walk, or by an event.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvpool.server.core.events import TOKEN_ID_BYTES, BlockStored, packed_token_ids
from kvpool.server.core.types import BlockHash, BlockId, GroupId

if TYPE_CHECKING:
    from kvpool.server.core.pool import Pool

_LOOKED_AT_PER_TOLD: Final = 8

# Parent's hash, token ids as bytes, LoRA name. A plain tuple of atoms, as the garbage collector leaves those alone.
_Contents = tuple[BlockHash | None, bytes, str | None]


class BlockContents:
    """Parent, tokens and LoRA of the cached blocks, in a column by block id."""

    __slots__ = ("_contents_of",)

    def __init__(self, num_blocks: int) -> None:
        self._contents_of: list[_Contents | None] = [None] * num_blocks

    def put(self, block_ids: Sequence[BlockId], stored: BlockStored) -> None:
        """Takes note of a run that was cached. O(tokens)."""
        packed, size_bytes = stored.token_ids.tobytes(), stored.block_size * TOKEN_ID_BYTES
        parent, lora_name = stored.parent_block_hash, stored.lora_name
        at = 0
        for block_id, block_hash in zip(block_ids, stored.block_hashes, strict=True):
            self._contents_of[block_id] = (parent, packed[at : at + size_bytes], lora_name)
            at += size_bytes
            parent = block_hash

    def get(self, block_id: BlockId) -> _Contents | None:
        """What a block was stored with; None if it has no hash."""
        return self._contents_of[block_id]

    def drop(self, block_id: BlockId) -> None:
        """Forgets a block that lost its hash."""
        self._contents_of[block_id] = None

    def clear(self) -> None:
        """Forgets all. O(num_blocks)."""
        self._contents_of = [None] * len(self._contents_of)


class ContentsWalk:
    """One walk over the cached blocks of a pool that makes events. Takes a byte a block of memory."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._blocks = pool.blocks
        self._seen = bytearray(pool.blocks.num_blocks)
        self._next = 1
        self._chain: list[BlockId] = []  # blocks that are to be told next, from the last to the first

    @property
    def is_done(self) -> bool:
        """Whether all blocks were looked at and told, or are all gone, as an event said."""
        is_at_end = not self._chain and self._next >= len(self._seen)
        return is_at_end or self._pool.blocks is not self._blocks

    def next_chunk(self, max_blocks: int) -> list[BlockStored]:
        """Looks at the next blocks, as they are now.

        Args:
            max_blocks: How many to tell of at most; several times as many may be looked at.

        Returns:
            Runs of what they hold, perhaps none.
        """
        told: list[BlockId] = []
        end = min(self._next + _LOOKED_AT_PER_TOLD * max_blocks, len(self._seen))
        while len(told) < max_blocks and (self._chain or self._next < end):
            if self._chain:
                told.append(self._chain.pop())
            else:
                self._climb(BlockId(self._next))
                self._next += 1
        return [run.stored() for run in self._runs(told)]

    def _climb(self, block_id: BlockId) -> None:
        """Puts on the chain the block and those that lead to it, up to one that was told already."""
        contents, prefix_map = self._blocks.contents, self._blocks.prefix_map
        at: BlockId | None = block_id
        while at is not None and not self._seen[at] and contents and (held := contents.get(at)):
            self._seen[at] = True
            self._chain.append(at)
            at = None if held[0] is None else prefix_map.first_copy(prefix_map.group_of(at), held[0])

    def _runs(self, block_ids: list[BlockId]) -> Iterator["_Run"]:
        contents, prefix_map = self._blocks.contents, self._blocks.prefix_map
        run: _Run | None = None
        for block_id in block_ids:
            block_hash, held = prefix_map.hash_of(block_id), contents.get(block_id) if contents else None
            if block_hash is None or held is None:  # lost since it was put on the chain
                continue
            parent, packed, lora_name = held
            group_id = prefix_map.group_of(block_id)
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
