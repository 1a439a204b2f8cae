"""What a snapshot has yet to write, kept as it was at the snapshot's moment while the core goes on changing it.

1. Nothing is copied at that moment that grows with the pool: a column is guarded, and what is changed ahead of the
   writing is kept first, value by value. So a change costs more by what it changes, however large the pool.
2. Chunks of the free list grow at their end or are replaced: where each begins and ends is enough. They are as many as
   tables that were freed, or fewer.
3. Of a request its numbers are copied; its lists only grow, so lengths are enough. Of a table that has skipped blocks,
   which changes in place, the blocks are copied that it still holds: those of its window.
4. The core is told nothing of it: a guarded column stands in the column's place, and the column comes back as it is.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Final

from kvpool.core.blocks.free_list import Chunk
from kvpool.core.ids import NULL_BLOCK, BlockId
from kvpool.core.sessions.request import BlockTable, Request

SLICE_BLOCKS: Final = 4096
_REQUEST_FIELDS: Final[tuple[str, ...]] = tuple(Request.__dataclass_fields__)
_values_of: Final = attrgetter(*_REQUEST_FIELDS)


class CopyOnWriteColumn:
    """Stands in the place of a column by block id while it is written; reads and changes go on to the column.

    Args:
        owner: Has the column as a field. Only its items may be changed, one by one, or the field be set anew.
        name: The field.
    """

    __slots__ = ("_before", "_name", "_num_written", "_owner", "_values")

    def __init__(self, owner: object, name: str) -> None:
        self._owner = owner
        self._name = name
        self._values: Any = getattr(owner, name)
        self._before: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # by slice, then block
        self._num_written = 0
        setattr(owner, name, self)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: int) -> Any:  # noqa: ANN401 - as the column's
        return self._values[at]

    def __setitem__(self, at: int, value: Any) -> None:  # noqa: ANN401 - as the column's
        if at >= self._num_written:
            self._before[at // SLICE_BLOCKS].setdefault(at, self._values[at])
        self._values[at] = value

    def slices(self) -> Iterator[Any]:
        """Copies the column as it was, piece by piece; changes may come between two. Gives it back at the end."""
        for start in range(0, len(self._values), SLICE_BLOCKS):
            piece = self._values[start : start + SLICE_BLOCKS]
            for at, value in self._before.pop(start // SLICE_BLOCKS, {}).items():
                piece[at - start] = value
            self._num_written = start + len(piece)
            yield piece
        self.give_back()

    def give_back(self) -> None:
        """Puts the column in its place again, unless another has taken it. Repeatable."""
        if getattr(self._owner, self._name) is self:
            setattr(self._owner, self._name, self._values)


class FrozenChunks:
    """The chunks of a free list as they were, end to end; of each, also what is passed over.

    Attributes:
        heads: Number and length of each.
    """

    __slots__ = ("_pieces", "heads")

    def __init__(self, chunks: Mapping[int, Chunk]) -> None:
        self._pieces = [(chunk.block_ids, chunk.at, len(chunk.block_ids)) for chunk in chunks.values()]
        self.heads = [(number, end - start) for number, (_, start, end) in zip(chunks, self._pieces, strict=True)]

    def __len__(self) -> int:
        return sum(length for _, length in self.heads)

    def slices(self) -> Iterator[list[BlockId]]:
        """Copies the blocks, a few at a time."""
        piece: list[BlockId] = []
        for block_ids, start, end in self._pieces:
            for at in range(start, end, SLICE_BLOCKS):
                piece += block_ids[at : min(at + SLICE_BLOCKS, end)]
                if len(piece) >= SLICE_BLOCKS:
                    yield piece
                    piece = []
        if piece:
            yield piece

    def give_back(self) -> None:
        """As of columns; nothing was lent."""


class FrozenRequests:
    """Requests as they were when they were added here."""

    __slots__ = ("_count", "_frozen")

    def __init__(self) -> None:
        self._frozen: deque[tuple[Any, ...]] = deque()
        self._count = 0

    def add(self, requests: Iterable[Request]) -> tuple[int, int]:
        """Freezes requests; returns the range of their places. O(requests + blocks in windows)."""
        first = self._count
        self._frozen.extend(map(_freeze, requests))
        self._count = len(self._frozen)
        return first, self._count

    def slices(self) -> Iterator[list[Request]]:
        """Makes copies of them, without holdings, a few at a time, in the order of their places. Uses them up."""
        piece: list[Request] = []
        size = 0
        while self._frozen:
            request = _thaw(*self._frozen.popleft())
            piece.append(request)
            size += 16 + len(request.hashes) + sum(len(table.block_ids) for table in request.tables)
            size += len(request.token_ids)
            if size >= SLICE_BLOCKS or not self._frozen:
                yield piece
                piece, size = [], 0


def _freeze(request: Request) -> tuple[Any, ...]:
    return (
        _values_of(request),
        len(request.hashes),
        len(request.token_ids),
        [(per_block, len(joined)) for per_block, joined in request.joined_hashes.items()],
        [
            (
                table.block_ids[table.num_skipped :] if table.num_skipped else table.block_ids,
                len(table.block_ids) - table.num_skipped,
                table.num_cached,
                table.num_skipped,
            )
            for table in request.tables
        ],
    )


def _thaw(
    values: tuple[Any, ...],
    num_hashes: int,
    num_token_ids: int,
    joined: list[tuple[int, int]],
    tables: list[tuple[list[BlockId], int, int, int]],
) -> Request:
    request = object.__new__(Request)
    for name, value in zip(_REQUEST_FIELDS, values, strict=True):
        setattr(request, name, value)
    request.hashes = request.hashes[:num_hashes]
    request.token_ids = request.token_ids[:num_token_ids]
    request.joined_hashes = {per_block: request.joined_hashes[per_block][:length] for per_block, length in joined}
    request.tables = tuple(
        BlockTable([NULL_BLOCK] * num_skipped + held[:length], num_cached, num_skipped)
        for held, length, num_cached, num_skipped in tables
    )
    request.holding = None
    return request
