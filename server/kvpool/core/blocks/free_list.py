"""How many tables each block stands in, and those in none, in the order in which they will be used again.

1. One column by block id: the number of tables that a block stands in, 1 for a sink; or, of a free block, 0 or less:
   the number of its chunk, negated. The null block is in no table and no chunk.
2. A chunk is a run of blocks that became free together, given back in one splice. Chunks are used in their order, and
   blocks in their order in it. A block that is hit while it is free stays where it stands in its chunk, and is passed
   over there: it is free in a chunk exactly when the column says so. A block stands once in a chunk.
3. A chunk that few blocks are left in is made anew: it never keeps more ids than twice those that are free, and some.
4. Every operation costs O(blocks named), spread over operations; none O(blocks in the pool).
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvpool.core.ids import BlockId

MAX_EXTENDED_BLOCKS: Final = 2**15
"""A chunk that has so many is extended no more: to make it anew would take milliseconds."""
_MANY_BLOCKS: Final = 64
"""So many become a chunk of their own, uncopied: the 300 bytes of a chunk are little for each of them."""
_SOME_BLOCKS: Final = 8


class Chunk:
    """A run of blocks that became free together.

    Attributes:
        block_ids: Its blocks; from `at` on those that are free in it, in order, and those to be passed over. Only grows
            at its end, or is replaced.
        at: Blocks before were taken.
        num_free: Blocks that are free in it.
    """

    __slots__ = ("at", "block_ids", "num_free")

    def __init__(self, block_ids: Sequence[BlockId]) -> None:
        self.block_ids = block_ids
        self.at = 0
        self.num_free = len(block_ids)


class FreeList:
    """Free blocks, from next used to last used, and the counts of the others. New: all but the null block, ascending.

    Attributes:
        num_free: Blocks in it.
        num_shared: Blocks that stand in more than one table.
    """

    __slots__ = ("_chunks", "_column", "_last_number", "_tail", "num_free", "num_shared")

    def __init__(self, num_blocks: int) -> None:
        self._column = [0] * num_blocks
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()
        self.num_free = num_blocks - 1
        if self.num_free:
            self._chunks[0] = Chunk(range(1, num_blocks))  # type: ignore[arg-type]  # ids that nobody has asked for yet
        self._last_number = 0
        self._tail = -1  # the chunk at the end, if it may be extended
        self.num_shared = 0

    def __len__(self) -> int:
        return self.num_free

    def __iter__(self) -> Iterator[BlockId]:
        column = self._column
        for number, chunk in self._chunks.items():
            yield from (block_id for block_id in chunk.block_ids[chunk.at :] if column[block_id] == -number)

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return len(self._column)

    def ref_cnt(self, block_id: BlockId) -> int:
        """Number of tables that the block stands in."""
        return max(self._column[block_id], 0)

    def num_free_among(self, block_ids: Iterable[BlockId]) -> int:
        """How many of these blocks are free, each counted as often as it is named."""
        column = self._column
        return [column[block_id] <= 0 for block_id in block_ids].count(True)

    def take(self, count: int) -> list[BlockId]:
        """Takes the next `count` blocks, each for one table; the caller has checked that there are so many."""
        column = self._column
        if count == 1:
            number, chunk = next(iter(self._chunks.items()))
            block_id = chunk.block_ids[chunk.at]
            if column[block_id] == -number:
                chunk.at += 1
                self._leave(number, chunk, 1)
                column[block_id] = 1
                self.num_free -= 1
                return [block_id]
        taken: list[BlockId] = []
        while len(taken) < count:
            number, chunk = next(iter(self._chunks.items()))
            while column[chunk.block_ids[chunk.at]] != -number:
                chunk.at += 1
            wanted = chunk.block_ids[chunk.at : chunk.at + count - len(taken)]
            is_whole = chunk.num_free == len(chunk.block_ids) - chunk.at
            chunk.at += len(wanted)
            found = wanted if is_whole else [block_id for block_id in wanted if column[block_id] == -number]
            if taken or not isinstance(found, list):
                taken += found
            else:
                taken = found
            self._leave(number, chunk, len(found))
        for block_id in taken:
            column[block_id] = 1
        self.num_free -= count
        return taken

    def hold(self, block_ids: Iterable[BlockId]) -> int:
        """Counts one more table for each block, free ones leaving the list; returns how many did."""
        column = self._column
        gone: dict[int, int] = {}
        num_shared = 0
        for block_id in block_ids:
            count = column[block_id]
            if count > 0:
                column[block_id] = count + 1
                if count == 1:
                    num_shared += 1
            else:
                column[block_id] = 1
                gone[count] = gone.get(count, 0) + 1
        self.num_shared += num_shared
        if not gone:
            return 0
        for negated, num_gone in gone.items():
            self._leave(-negated, self._chunks[-negated], num_gone)
            if -negated == self._tail:  # what comes back must not stand in it twice
                self._tail = -1
        num_held = sum(gone.values())
        self.num_free -= num_held
        return num_held

    def drop(self, block_ids: Sequence[BlockId]) -> Sequence[BlockId]:
        """Counts one table less for each block.

        Returns:
            Those that are in none any more, in their order; they must be given to `append` or `prepend` next.
        """
        if not self.num_shared:
            return block_ids
        column = self._column
        if [column[block_id] for block_id in block_ids].count(1) == len(block_ids):
            return block_ids
        dropped = []
        num_shared = 0
        for block_id in block_ids:
            count = column[block_id] - 1
            column[block_id] = count
            if count < 2:  # noqa: PLR2004 - shared no more
                if count:
                    num_shared += 1
                else:
                    dropped.append(block_id)
        self.num_shared -= num_shared
        return dropped

    def append(self, block_ids: Sequence[BlockId]) -> None:
        """Puts blocks that are in no table, nor in the list, last, in their order. Keeps a list that it is given."""
        count = len(block_ids)
        if not count:
            return
        chunk = self._chunks.get(self._tail) if count < _MANY_BLOCKS else None
        if chunk is not None and len(chunk.block_ids) < MAX_EXTENDED_BLOCKS:
            chunk.block_ids += block_ids  # type: ignore[operator]  # a list, but for the first, which is no tail
            chunk.num_free += count
        else:
            self._tail = self._add_chunk(block_ids)
        self._mark(self._tail, block_ids)

    def prepend(self, block_ids: Sequence[BlockId]) -> None:
        """Puts blocks that are in no table, nor in the list, first, keeping their order."""
        if not block_ids:
            return
        number = self._add_chunk(block_ids)
        self._chunks.move_to_end(number, last=False)
        self._mark(number, block_ids)

    def _add_chunk(self, block_ids: Sequence[BlockId]) -> int:
        self._last_number += 1
        self._chunks[self._last_number] = Chunk(block_ids if isinstance(block_ids, list) else list(block_ids))
        return self._last_number

    def _mark(self, number: int, block_ids: Sequence[BlockId]) -> None:
        column, negated = self._column, -number
        for block_id in block_ids:
            column[block_id] = negated
        self.num_free += len(block_ids)

    def _leave(self, number: int, chunk: Chunk, num_gone: int) -> None:
        """Counts blocks that are not free in a chunk any more."""
        chunk.num_free -= num_gone
        if not chunk.num_free:
            del self._chunks[number]
        elif len(chunk.block_ids) > 2 * chunk.num_free + _SOME_BLOCKS:
            rest = chunk.block_ids[chunk.at :]
            if chunk.num_free < len(rest):
                column = self._column
                rest = [block_id for block_id in rest if column[block_id] == -number]
            chunk.block_ids, chunk.at = rest, 0
