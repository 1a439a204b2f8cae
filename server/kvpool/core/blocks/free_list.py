"""Reference counts of all blocks, and the free blocks in the order of their next use.

1. One column by block id. For a block in use it holds the number of tables that contain the block, 1 for a sink. For a
   free block it holds the negated number of the block's chunk, 0 or less. The null block is in no table and no chunk.
2. A chunk is a run of blocks that became free together and were returned in one splice. Chunks are used in their order,
   and blocks in their order within a chunk. A free block that is hit stays in its chunk's list and is skipped there: a
   block is free in a chunk exactly when the column says so. A block occurs once in a chunk.
3. A chunk with few remaining blocks is rebuilt: a chunk never keeps more than twice as many ids as it has free blocks,
   plus a small constant.
4. Every operation costs amortized O(blocks named). No operation costs O(blocks in the pool).
5. Chunk 0 holds the blocks that were never used, in order. The columns of a pool grow with the use of its blocks: they
   have entries for the first blocks, among them all that were ever used. A block without entries is in chunk 0.
   A block that was never used is in no prefix, so it is not hit. Columns of full size took 180 ms and 400 MiB for 2^24
   blocks when a pool was created, and all other sessions waited.
6. Only its holder takes blocks of a chunk that has one: a session whose steps in flight may read or write them, see
   `StepsInFlight`. While its holder alone takes blocks, the order is not affected. A chunk that another session reaches
   is parked: it leaves the order until it is released, and its holder takes it first. When each block was looked for
   behind 61,440 held chunks, a step of 2,048 admissions took 11 s.

A linked list in two columns took 290 ns per freed block of a table and 16 bytes per block; chunks take 90 ns:

    chunk 7   block_ids   [ taken  taken  free  hit  free  free ]      column[free] == -7, column[hit] >= 1
                                          ^ at                         num_free == 3
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import sub
from typing import Final

from kvpool.core import ids
from kvpool.core.ids import BlockId, SessionNumber
from kvpool.core.snapshots import Column, ColumnCopy, extend, shared

GROWTH_BLOCKS: Final = 2**14
"""The columns of a pool grow by at least this many blocks, in less than a millisecond."""
MAX_EXTENDED_BLOCKS: Final = 2**15
"""A chunk of this many blocks is not extended further, because rebuilding it would take milliseconds."""
_MANY_BLOCKS: Final = 64
"""A run of this many blocks becomes a chunk of its own without a copy. The 300 bytes of a chunk are then negligible."""
_SOME_BLOCKS: Final = 8
_CHUNKS_SLICE_LENGTH: Final = 512
NO_SESSION: Final = SessionNumber(0)
NO_STEP: Final = ids.StepNumber(0)


class Chunk:
    """A run of blocks that became free together.

    Attributes:
        block_ids: The blocks. From `at` on, blocks that are free in this chunk, in order, and blocks to be skipped. The
            list only grows at its end, or is replaced.
        at: Blocks before this index were taken.
        num_free: Number of blocks that are free in this chunk.
        holder: Session that alone takes these blocks; 0 for none.
        until: Step of the holder whose execution ends this; 0 without a holder.
    """

    __slots__ = ("at", "block_ids", "holder", "num_free", "until")

    def __init__(self, block_ids: Sequence[BlockId]) -> None:
        self.block_ids = block_ids
        self.at = 0
        self.num_free = len(block_ids)
        self.holder = NO_SESSION
        self.until = NO_STEP


class _Held:
    """What a session holds.

    Attributes:
        chunks: Its chunks by number, in the order in which they were freed. An OrderedDict finds its first key in O(1),
            even after many deletions.
        num_free: Their free blocks together.
    """

    __slots__ = ("chunks", "num_free")

    def __init__(self) -> None:
        self.chunks: OrderedDict[int, Chunk] = OrderedDict()
        self.num_free = 0


@dataclass(frozen=True, slots=True)
class FreeListSnapshot:
    """A free list at one moment.

    Attributes:
        column: See rule 1.
        chunk_lengths: Number and length of each chunk, first parked ones, then in order.
        chunk_entries: The block ids in all chunks but 0, those to be skipped included. Chunk 0 holds the last ids.
        last_number: Newest number of a chunk.
        tail: Number of the chunk at the end, if it may be extended; else -1.
        held_chunks: Holder, number and last step of each chunk with a holder, see `Chunk`. The number of a parked chunk
            is negated.
    """

    column: Column[int]
    chunk_lengths: Column[tuple[int, int]]
    chunk_entries: Column[BlockId]
    last_number: int
    tail: int
    held_chunks: Column[tuple[SessionNumber, int, ids.StepNumber]]


class FreeList:
    """Free blocks, from next used to last used, and reference counts of the others. Initially all but the null block.

    Attributes:
        num_blocks: Number of blocks, the null block included.
        num_free: Number of free blocks.
        num_shared: Number of blocks that are in more than one table.
        num_held: Number of free blocks in chunks with a holder.
        user: Session whose step takes and frees blocks; 0 for none.
        until: If steps of the user are in flight, the newest of them: it holds what it frees until then; else 0.
    """

    __slots__ = (
        "_chunks",
        "_column",
        "_copy",
        "_held",
        "_last_number",
        "_order",
        "_parked",
        "_tail",
        "num_blocks",
        "num_free",
        "num_held",
        "num_shared",
        "until",
        "user",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._column = [0] * min(num_blocks, GROWTH_BLOCKS)
        self._chunks: dict[int, Chunk] = {}
        self._order: OrderedDict[int, Chunk] = OrderedDict()  # the chunks that are not parked
        self.num_free = num_blocks - 1
        if self.num_free:
            unused = Chunk(range(1, num_blocks))  # type: ignore[arg-type]  # ids that were never allocated
            self._chunks[0] = self._order[0] = unused
        self._last_number = 0
        self._tail = -1  # the chunk at the end, if it may be extended
        self.num_shared = 0
        self.num_held = 0
        self.user, self.until = NO_SESSION, NO_STEP
        self._held: dict[SessionNumber, _Held] = {}
        self._parked: dict[SessionNumber, OrderedDict[int, Chunk]] = {}  # by holder, of those that have parked chunks
        self._copy: ColumnCopy[int] | None = None  # of the column, while a snapshot is read

    def __len__(self) -> int:
        return self.num_free

    def __iter__(self) -> Iterator[BlockId]:
        column, num_columns = self._column, len(self._column)
        parked = (each for chunks in self._parked.values() for each in chunks.items())
        for number, chunk in [*parked, *self._order.items()]:
            rest = chunk.block_ids[chunk.at :]
            yield from (block_id for block_id in rest if block_id >= num_columns or column[block_id] == -number)

    @property
    def num_columns(self) -> int:
        """Number of first blocks that have entries in the columns of the pool."""
        return len(self._column)

    @property
    def num_next_columns(self) -> int:
        """Number of next blocks that have entries, even if all of them were never used. All blocks if all have."""
        num_columns = len(self._column)
        if num_columns == self.num_blocks:
            return num_columns
        unused = self._chunks[0]
        return num_columns - unused.block_ids[unused.at]

    def num_columns_for(self, count: int) -> int:
        """Number of entries to which the columns are to be extended if they lack some for the next `count` blocks."""
        return min(len(self._column) + max(count, GROWTH_BLOCKS), self.num_blocks)

    def extend_columns(self, num_columns: int) -> None:
        """Makes entries for the first `num_columns` blocks."""
        extend(self._column, num_columns, 0)

    def sampled_order(self, count: int) -> list[BlockId]:
        """About `count` of the free blocks that were ever used, from next used to last used. O(count + chunks)."""
        column, step, position = self._column, max(self.num_free // count, 1), 0
        found: list[BlockId] = []
        for number, chunk in islice(self._order.items(), 0, None, len(self._order) // count + 1):
            if number:
                some = chunk.block_ids[chunk.at + -position % step :: step]
                found += [block_id for block_id in some if column[block_id] == -number]
                position += len(chunk.block_ids) - chunk.at
        return found

    def next_used(self, count: int) -> list[BlockId]:
        """Those of the next `count` blocks that were ever used, in order, without parked ones. O(entries so far)."""
        column, found = self._column, list[BlockId]()
        for number, chunk in self._order.items():
            if count <= 0:
                break
            if number:
                rest = map(chunk.block_ids.__getitem__, range(chunk.at, len(chunk.block_ids)))
                found += islice((block_id for block_id in rest if column[block_id] == -number), count)
            count -= chunk.num_free
        return found

    def entries(self, blocks: slice) -> list[int]:
        """The column's entries of these blocks, see rule 1. A copy."""
        return self._column[blocks]

    def ref_cnt(self, block_id: BlockId) -> int:
        """Number of tables that contain the block."""
        return max(self._column[block_id], 0) if block_id < len(self._column) else 0

    @property
    def num_in_chunks(self) -> int:
        """Number of blocks that the chunks count as free, which is `num_free`. O(chunks)."""
        return sum(chunk.num_free for chunk in self._chunks.values())

    def is_in_chunk(self, block_id: BlockId) -> bool:
        """Whether the block is of an existing chunk, as each free one is."""
        return -self._column[block_id] in self._chunks if block_id < len(self._column) else 0 in self._chunks

    def num_free_among(self, block_ids: Iterable[BlockId]) -> int:
        """Number of free blocks among these; a block that occurs twice counts twice."""
        column = self._column
        return [column[block_id] <= 0 for block_id in block_ids].count(True)

    @property
    def num_available(self) -> int:
        """Number of blocks that the user can take."""
        return self.num_free - self.num_held + self.num_held_by(self.user)

    def num_held_by(self, holder: SessionNumber) -> int:
        """Number of free blocks that a session holds."""
        held = self._held.get(holder)
        return held.num_free if held else 0

    def num_held_among(self, block_ids: Iterable[BlockId]) -> int:
        """Number of free blocks among these that the user holds; a block that occurs twice counts twice."""
        column, chunks = self._column, self._chunks
        return [chunks[-column[b]].holder == self.user for b in block_ids if column[b] <= 0].count(True)

    def put_own_first(self, count: int) -> None:
        """Moves to the front what the user holds, in order, until `count` blocks are there. O(count)."""
        moved, held = [], self._held.get(self.user)
        for number, chunk in held.chunks.items() if held else ():
            if count <= 0:
                break
            count -= chunk.num_free
            if number in self._order:  # its parked chunks come first anyway
                moved.append(number)
        for number in reversed(moved):
            self._order.move_to_end(number, last=False)
            self._tail = -1

    def held_for_others(self, block_ids: Iterable[BlockId]) -> list[tuple[BlockId, Chunk]]:
        """Those of the blocks, null ones ignored, that another session than the user holds, with their chunks."""
        column, chunks, usable = self._column, self._chunks, (NO_SESSION, self.user)
        found = [(b, chunks[-column[b]]) for b in block_ids if b and column[b] <= 0]
        return [(block_id, chunk) for block_id, chunk in found if chunk.holder not in usable]

    def held_by(self, holder: SessionNumber) -> list[BlockId]:
        """The free blocks that a session holds."""
        column, held = self._column, self._held.get(holder)
        chunks = held.chunks.items() if held else ()
        return [b for number, chunk in chunks for b in chunk.block_ids[chunk.at :] if column[b] == -number]

    def release(self, holder: SessionNumber, executed: ids.StepNumber) -> None:
        """Makes the blocks free for all that a session holds until a step up to `executed`. O(their chunks)."""
        held = self._held.get(holder)
        if held is None:
            return
        unparked = []
        while held.chunks:
            number, chunk = next(iter(held.chunks.items()))
            if chunk.until > executed:
                break
            del held.chunks[number]
            held.num_free -= chunk.num_free
            self.num_held -= chunk.num_free
            chunk.holder, chunk.until = NO_SESSION, NO_STEP
            if self._unpark(holder, number):
                unparked.append((number, chunk))
        for number, chunk in reversed(unparked):  # to the front, in the order in which they were freed
            self._order[number] = chunk
            self._order.move_to_end(number, last=False)
        if not held.chunks:
            del self._held[holder]

    def take(self, count: int) -> list[BlockId]:
        """Takes the next `count` blocks, each for one table.

        The caller has checked that enough are free, and have entries.
        """
        column = self._column
        if count == 1 and not self._parked:  # most calls: a decode that has filled its block
            number, chunk = next(iter(self._order.items()))
            block_id = chunk.block_ids[chunk.at]
            if column[block_id] == -number and chunk.holder in (NO_SESSION, self.user):
                chunk.at += 1
                self._leave(number, chunk, 1)
                if self._copy:
                    self._copy.before_change((block_id,))
                column[block_id] = 1
                self.num_free -= 1
                return [block_id]
        taken: list[BlockId] = []
        while len(taken) < count:
            number, chunk = self._next_chunk() if self.num_held else next(iter(self._order.items()))
            while column[chunk.block_ids[chunk.at]] != -number:
                chunk.at += 1
            wanted = chunk.block_ids[chunk.at : chunk.at + count - len(taken)]
            # Without a hit in the chunk, the slice is the answer: no look at the column per block.
            is_whole = chunk.num_free == len(chunk.block_ids) - chunk.at
            chunk.at += len(wanted)
            found = wanted if is_whole else [block_id for block_id in wanted if column[block_id] == -number]
            if taken or not isinstance(found, list):
                taken += found
            else:
                taken = found
            self._leave(number, chunk, len(found))
        if self._copy:
            self._copy.before_change(taken)
        for block_id in taken:
            column[block_id] = 1
        self.num_free -= count
        return taken

    def _next_chunk(self) -> tuple[int, Chunk]:
        """The next chunk from which the user can take blocks; parks those before it. Amortized O(1)."""
        own = self._parked.get(self.user)
        if own:
            return next(iter(own.items()))
        while True:
            number, chunk = next(iter(self._order.items()))
            if chunk.holder in (NO_SESSION, self.user):
                return number, chunk
            self._park(number)

    def _park(self, number: int) -> None:
        chunk = self._order.pop(number)
        self._parked.setdefault(chunk.holder, OrderedDict())[number] = chunk
        if number == self._tail:
            self._tail = -1

    def _unpark(self, holder: SessionNumber, number: int) -> bool:
        """Makes a chunk no longer parked. Returns whether it was."""
        parked = self._parked.get(holder)
        if parked is None or parked.pop(number, None) is None:
            return False
        if not parked:
            del self._parked[holder]
        return True

    def hold(self, block_ids: Sequence[BlockId]) -> int:
        """Adds one reference to each block, and removes free ones from the list; returns how many were free."""
        if self._copy:
            self._copy.before_change(block_ids)
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
            if -negated == self._tail:  # a returned block must not occur in it twice
                self._tail = -1
        num_held = sum(gone.values())
        self.num_free -= num_held
        return num_held

    def drop(self, block_ids: Sequence[BlockId]) -> Sequence[BlockId]:
        """Removes one reference from each block.

        Returns:
            The blocks without references, in order. The caller must pass them to `append` or `prepend` next.
        """
        if not self.num_shared:
            return block_ids
        column = self._column
        # As above, the entries stay: `append` or `prepend` overwrites them, so a pass over them here would be wasted.
        if [column[block_id] for block_id in block_ids].count(1) == len(block_ids):
            return block_ids
        if self._copy:
            self._copy.before_change(block_ids)
        dropped = []
        num_shared = 0
        for block_id in block_ids:
            count = column[block_id] - 1
            column[block_id] = count
            if count < 2:  # noqa: PLR2004 - no longer shared
                if count:
                    num_shared += 1
                else:
                    dropped.append(block_id)
        self.num_shared -= num_shared
        return dropped

    def append(self, block_ids: Sequence[BlockId]) -> None:
        """Adds unreferenced blocks at the end, in order. Keeps a list that is passed, without copying it."""
        count = len(block_ids)
        if not count:
            return
        chunk = self._chunks.get(self._tail) if count < _MANY_BLOCKS else None
        is_alike = chunk is not None and chunk.until == self.until and (not self.until or chunk.holder == self.user)
        if chunk is not None and is_alike and chunk.num_free < MAX_EXTENDED_BLOCKS:
            chunk.block_ids += block_ids  # type: ignore[operator]  # a list, except for the first chunk, which is never the tail
            chunk.num_free += count
        else:
            self._tail = self._add_chunk(block_ids)
        self._mark(self._tail, block_ids)

    def prepend(self, block_ids: Sequence[BlockId]) -> None:
        """Adds unreferenced blocks at the front, in order."""
        if not block_ids:
            return
        number = self._add_chunk(block_ids)
        self._order.move_to_end(number, last=False)
        self._mark(number, block_ids)

    def snapshot(self) -> FreeListSnapshot:
        """The list at this moment; read it before `end_snapshot`. O(chunks), 0.1 us each."""
        self._copy = ColumnCopy(self._column)
        # Lists of one attribute each: with tuples, collections of garbage took 140 ms for 61,440 chunks.
        parked = dict.fromkeys(chain.from_iterable(self._parked.values()))
        numbers = [*parked, *self._order]
        chunks = [self._chunks[number] for number in numbers]
        block_ids, starts = [chunk.block_ids for chunk in chunks], [chunk.at for chunk in chunks]
        ends = [len(each) for each in block_ids]
        parts = zip(numbers, block_ids, starts, ends, strict=True)
        held = [(each, list(of.chunks), [c.until for c in of.chunks.values()]) for each, of in self._held.items()]
        held_chunks = (
            (holder, -number if number in parked else number, until)
            for holder, numbers_held, untils in held
            for number, until in zip(numbers_held, untils, strict=True)
        )
        return FreeListSnapshot(
            Column(self._copy),
            Column(zip(numbers, map(sub, ends, starts), strict=True), _CHUNKS_SLICE_LENGTH),
            Column(chain.from_iterable(islice(ids, start, end) for number, ids, start, end in parts if number)),
            self._last_number,
            self._tail,
            Column(held_chunks, _CHUNKS_SLICE_LENGTH),
        )

    def end_snapshot(self) -> None:
        """Ends a snapshot. The rest of it can no longer be read."""
        self._copy = None

    def restore(self, snapshot: FreeListSnapshot, all_ids: Sequence[BlockId]) -> None:
        """Makes a new list as it was; `all_ids` are the ids of the blocks with entries, so that each is one object.

        Raises:
            ValueError: The snapshot is not of a list of this size.
            LookupError: A block or a chunk does not exist.
        """
        self._column = column = shared(snapshot.column.values)
        entries = iter(snapshot.chunk_entries.values)
        self._chunks.clear()
        self._order.clear()
        for number, length in snapshot.chunk_lengths.values:
            if number:
                chunk = Chunk([all_ids[i] for i in islice(entries, length) if column[i] == -number])
            else:
                chunk = Chunk(range(self.num_blocks - length, self.num_blocks))  # type: ignore[arg-type]  # as above
            if chunk.num_free:
                self._chunks[number] = self._order[number] = chunk
        self.num_free = self.num_in_chunks
        num_free = [count <= 0 for count in column].count(True) + self.num_blocks - len(column)
        if len(column) != len(all_ids) or num_free != self.num_free + 1:
            raise ValueError("blocks of the free list are missing")
        self._last_number, self._tail = snapshot.last_number, snapshot.tail
        held_chunks = list(snapshot.held_chunks.values)
        for holder, number, until in held_chunks:
            self._set_holder(abs(number), holder, until)
            self._count_held(holder, self._chunks[abs(number)].num_free)
        parked = {-number for _, number, _ in held_chunks if number < 0}
        for number in [number for number in self._order if number in parked]:
            self._park(number)
        self.num_shared = [count > 1 for count in column].count(True)

    def _add_chunk(self, block_ids: Sequence[BlockId]) -> int:
        self._last_number += 1
        chunk = Chunk(block_ids if isinstance(block_ids, list) else list(block_ids))
        self._chunks[self._last_number] = self._order[self._last_number] = chunk
        if self.until:
            self._set_holder(self._last_number, self.user, self.until)
        return self._last_number

    def _set_holder(self, number: int, holder: SessionNumber, until: ids.StepNumber) -> None:
        chunk = self._chunks[number]
        chunk.holder, chunk.until = holder, until
        self._held.setdefault(holder, _Held()).chunks[number] = chunk

    def _drop_held(self, number: int, holder: SessionNumber) -> None:
        held = self._held[holder]
        del held.chunks[number]
        self._unpark(holder, number)
        if not held.chunks:
            del self._held[holder]

    def _count_held(self, holder: SessionNumber, count: int) -> None:
        self._held[holder].num_free += count
        self.num_held += count

    def _mark(self, number: int, block_ids: Sequence[BlockId]) -> None:
        if self._copy:
            self._copy.before_change(block_ids)
        column, negated = self._column, -number
        for block_id in block_ids:
            column[block_id] = negated
        self.num_free += len(block_ids)
        if self.until:
            self._count_held(self.user, len(block_ids))

    def _leave(self, number: int, chunk: Chunk, num_gone: int) -> None:
        """Counts blocks that are no longer free in a chunk."""
        chunk.num_free -= num_gone
        if chunk.holder:
            self._count_held(chunk.holder, -num_gone)
        if not chunk.num_free:
            del self._chunks[number]
            self._order.pop(number, None)
            if chunk.holder:
                self._drop_held(number, chunk.holder)
        elif len(chunk.block_ids) > 2 * chunk.num_free + _SOME_BLOCKS:
            rest = chunk.block_ids[chunk.at :]
            if chunk.num_free < len(rest):
                column = self._column
                rest = [block_id for block_id in rest if column[block_id] == -number]
            chunk.block_ids, chunk.at = rest, 0
