"""The contents that each cached block was stored with.

A block has contents exactly when it has a hash, in a pool that makes events.
"""

from collections.abc import Sequence

from kvpool.core.events import TOKEN_ID_BYTES, BlockStored
from kvpool.core.ids import BlockHash, BlockId

# Parent's hash, token ids as bytes, LoRA name. A plain tuple of atoms, as the garbage collector leaves those alone.
_Contents = tuple[BlockHash | None, bytes, str | None]


class BlockContents:
    """Parent, tokens and LoRA of the cached blocks, in a column by block id."""

    __slots__ = ("_contents",)

    def __init__(self, num_blocks: int) -> None:
        self._contents: list[_Contents | None] = [None] * num_blocks

    def put(self, block_ids: Sequence[BlockId], stored: BlockStored) -> None:
        """Takes note of a run that was cached. O(tokens)."""
        packed, size_bytes = stored.token_ids.tobytes(), stored.block_size * TOKEN_ID_BYTES
        parent, lora_name = stored.parent_block_hash, stored.lora_name
        at = 0
        for block_id, block_hash in zip(block_ids, stored.block_hashes, strict=True):
            self._contents[block_id] = (parent, packed[at : at + size_bytes], lora_name)
            at += size_bytes
            parent = block_hash

    def get(self, block_id: BlockId) -> _Contents | None:
        """What a block was stored with; None if it has no hash."""
        return self._contents[block_id]

    def drop(self, block_id: BlockId) -> None:
        """Forgets a block that lost its hash."""
        self._contents[block_id] = None

    def clear(self) -> None:
        """Forgets all. O(num_blocks)."""
        self._contents = [None] * len(self._contents)
