"""The free blocks in the order in which they will be used again.

1. A circular, doubly linked list in two columns of ints, indexed by block id. The null block is its sentinel: what
   follows it is used next, what precedes it is used last.
2. A block is in the list exactly when its ref_cnt is 0; the caller keeps this.
3. Every operation costs O(blocks named), none O(blocks in the pool).
"""

from collections.abc import Iterator, Sequence

from kvpool.server.core.types import NULL_BLOCK, BlockId


class FreeList:
    """Free blocks, from next used to last used. New: all blocks but the null block, ascending."""

    __slots__ = ("_len", "_next", "_prev")

    def __init__(self, num_blocks: int) -> None:
        ids = [BlockId(i) for i in range(num_blocks)]
        # Both columns share the int objects of `ids`: 16 bytes a block and list, not 44.
        self._next = [*ids[1:], NULL_BLOCK]
        self._prev = [ids[-1], *ids[:-1]]
        self._len = num_blocks - 1

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[BlockId]:
        follow = self._next
        block_id = follow[NULL_BLOCK]
        while block_id:
            yield block_id
            block_id = follow[block_id]

    def take(self, count: int) -> list[BlockId]:
        """Removes and returns the next `count` blocks; the caller has checked that there are so many."""
        follow = self._next
        block_id = follow[NULL_BLOCK]
        taken = []
        for _ in range(count):
            taken.append(block_id)
            block_id = follow[block_id]
        follow[NULL_BLOCK] = block_id
        self._prev[block_id] = NULL_BLOCK
        self._len -= count
        return taken

    def remove(self, block_id: BlockId) -> None:
        """Removes a block of the list from anywhere in it."""
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before
        self._len -= 1

    def append(self, block_ids: Sequence[BlockId]) -> None:
        """Puts blocks that are not in the list last, keeping their order."""
        self._splice(self._prev[NULL_BLOCK], block_ids, NULL_BLOCK)

    def prepend(self, block_ids: Sequence[BlockId]) -> None:
        """Puts blocks that are not in the list first, keeping their order."""
        self._splice(NULL_BLOCK, block_ids, self._next[NULL_BLOCK])

    def _splice(self, before: BlockId, block_ids: Sequence[BlockId], after: BlockId) -> None:
        follow, precede = self._next, self._prev
        for block_id in block_ids:
            follow[before] = block_id
            precede[block_id] = before
            before = block_id
        follow[before] = after
        precede[after] = before
        self._len += len(block_ids)
