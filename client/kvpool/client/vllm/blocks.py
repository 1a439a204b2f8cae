"""What vLLM's scheduler is given for blocks: ids, group by group, in the place of its own objects."""

from collections.abc import Sequence

from kvpool.server.core.pool import ComputedBlocks


class KVCacheBlocks:
    """Blocks of a request, as the scheduler hands them on. Never changed.

    Attributes:
        block_ids: Their ids, group by group.
        computed: The hit that they are, if a look-up found them.
    """

    __slots__ = ("block_ids", "computed")

    def __init__(self, block_ids: Sequence[Sequence[int]], computed: ComputedBlocks | None = None) -> None:
        self.block_ids = block_ids
        self.computed = computed

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

    def new_empty(self) -> "KVCacheBlocks":
        """No blocks, in as many groups."""
        return KVCacheBlocks([()] * len(self.block_ids))
