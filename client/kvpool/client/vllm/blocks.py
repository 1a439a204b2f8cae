"""Blocks as vLLM's scheduler receives them: ids per group instead of vLLM's own objects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.ids import NULL_BLOCK, BlockHash


class KVCacheBlock(NamedTuple):
    """A block as KV connectors read it."""

    block_id: int
    block_hash: BlockHash | None

    @property
    def is_null(self) -> bool:
        """Whether this is the null block."""
        return self.block_id == NULL_BLOCK


@dataclass(slots=True, eq=False, repr=False)
class KVCacheBlocks:
    """Blocks of a request. Immutable, except for `pending`.

    Attributes:
        block_ids: Block ids per group.
        computed: The hit, if a look-up found the blocks.
        hashes: Hashes of the cached blocks of the first group, if KV connectors need them.
    """

    block_ids: Sequence[Sequence[int]]
    computed: ComputedBlocks | None = None
    hashes: Sequence[BlockHash] = ()

    @classmethod
    def pending(cls) -> "KVCacheBlocks":
        """Makes blocks whose ids are set when the round is answered."""
        blocks = cls.__new__(cls)
        blocks.computed, blocks.hashes = None, ()
        return blocks

    def __getattr__(self, name: str) -> NoReturn:
        """Handles access to an attribute that is not set."""
        if name == "block_ids":
            raise RuntimeError("blocks were read before the answer of the round arrived")
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<KVCacheBlocks {self.block_ids}>"

    def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
        return KVCacheBlocks([[*mine, *theirs] for mine, theirs in zip(self.block_ids, other.block_ids, strict=True)])

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Copies the ids of all or some groups; None if there are none and `allow_none` is set."""
        groups = self.block_ids if group_ids is None else [self.block_ids[i] for i in group_ids]
        if allow_none and not any(groups):
            return None
        return tuple(list(ids) for ids in groups)

    @property
    def blocks(self) -> tuple[list[KVCacheBlock], ...]:
        """The blocks as objects, per group."""
        cached = self.hashes
        return tuple(
            [KVCacheBlock(block_id, cached[i] if i < len(cached) else None) for i, block_id in enumerate(ids)]
            for ids in self.block_ids
        )

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks of the first group that are not cached."""
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Ids of the blocks that are not cached, per group, without null blocks."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> "KVCacheBlocks":
        """No blocks, with the same number of groups."""
        return KVCacheBlocks([()] * len(self.block_ids))
