"""What vLLM's scheduler is given for blocks: ids, group by group, in the place of its own objects."""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.ids import NULL_BLOCK, BlockHash


class KVCacheBlock(NamedTuple):
    """A block, as KV connectors look at it."""

    block_id: int
    block_hash: BlockHash | None

    @property
    def is_null(self) -> bool:
        """Whether it stands for none."""
        return self.block_id == NULL_BLOCK


class KVCacheBlocks:
    """Blocks of a request, as the scheduler hands them on. Never changed, but see `promised`.

    Attributes:
        block_ids: Their ids, group by group.
        computed: The hit that they are, if a look-up found them.
        hashes: Of those of the first group that are cached, where KV connectors ask for them.
    """

    __slots__ = ("block_ids", "computed", "hashes")

    def __init__(
        self,
        block_ids: Sequence[Sequence[int]],
        computed: ComputedBlocks | None = None,
        hashes: Sequence[BlockHash] = (),
    ) -> None:
        self.block_ids = block_ids
        self.computed = computed
        self.hashes = hashes

    @classmethod
    def promised(cls) -> "KVCacheBlocks":
        """Blocks whose ids are set when the round has its answer."""
        blocks = cls.__new__(cls)
        blocks.computed, blocks.hashes = None, ()
        return blocks

    def __getattr__(self, name: str) -> NoReturn:
        """Is asked for what is not set."""
        if name == "block_ids":
            raise RuntimeError("blocks were looked at before the round's answer was waited for")
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<KVCacheBlocks {self.block_ids}>"

    def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
        return KVCacheBlocks([[*mine, *theirs] for mine, theirs in zip(self.block_ids, other.block_ids, strict=True)])

    def get_block_ids(
        self,
        allow_none: bool = False,
        *,
        group_ids: Sequence[int] | None = None,
    ) -> tuple[list[int], ...] | None:
        """Copies the ids, of all groups or some; None if there are none and that is allowed."""
        groups = self.block_ids if group_ids is None else [self.block_ids[i] for i in group_ids]
        if allow_none and not any(groups):
            return None
        return tuple(list(ids) for ids in groups)

    @property
    def blocks(self) -> tuple[list[KVCacheBlock], ...]:
        """The blocks one by one."""
        cached = self.hashes
        return tuple(
            [KVCacheBlock(block_id, cached[i] if i < len(cached) else None) for i, block_id in enumerate(ids)]
            for ids in self.block_ids
        )

    def get_unhashed_block_ids(self) -> list[int]:
        """The ids of those that are not cached."""
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """The same, of each group; blocks that stand for none are left out."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> "KVCacheBlocks":
        """No blocks, in as many groups."""
        return KVCacheBlocks([()] * len(self.block_ids))
