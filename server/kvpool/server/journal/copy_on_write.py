"""Data that a snapshot still has to write, preserved as of the snapshot's moment while the core changes it.

1. At that moment, nothing proportional to the pool is copied. A wrapper replaces each column and saves a value before
   the first change that precedes its writing. The extra cost is per changed value, independent of the pool's size.
2. Chunks of the free list grow at their end or are replaced, so their bounds suffice. There are at most as many chunks
   as tables that were freed.
3. The scalar fields of a request are copied. Its lists only grow, so their lengths suffice. A table with skipped blocks
   changes in place; for it, the blocks that it still holds (those of its window) are copied.
4. The core does not know of this. The wrapper takes the column's place, and the column is put back afterwards.
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
    """Replaces a column (indexed by block id) while it is written, and passes reads and changes to it.

    Args:
        owner: The object with the column. It may change single items of the column, or replace the column.
        name: Name of the field.
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

    def __getitem__(self, at: int) -> Any:  # noqa: ANN401 - same as the column's
        return self._values[at]

    def __setitem__(self, at: int, value: Any) -> None:  # noqa: ANN401 - same as the column's
        if at >= self._num_written:
            self._before[at // SLICE_BLOCKS].setdefault(at, self._values[at])
        self._values[at] = value

    def slices(self) -> Iterator[Any]:
        """Yields copies of slices of the original column, and restores it at the end. Changes may come in between."""
        for start in range(0, len(self._values), SLICE_BLOCKS):
            piece = self._values[start : start + SLICE_BLOCKS]
            for at, value in self._before.pop(start // SLICE_BLOCKS, {}).items():
                piece[at - start] = value
            self._num_written = start + len(piece)
            yield piece
        self.give_back()

    def give_back(self) -> None:
        """Restores the column, unless the owner has replaced it. Repeatable."""
        if getattr(self._owner, self._name) is self:
            setattr(self._owner, self._name, self._values)


class FrozenChunks:
    """The original chunks of a free list, concatenated, including entries that the free list skips.

    Attributes:
        heads: Number and length of each chunk.
    """

    __slots__ = ("_pieces", "heads")

    def __init__(self, chunks: Mapping[int, Chunk]) -> None:
        self._pieces = [(chunk.block_ids, chunk.at, len(chunk.block_ids)) for chunk in chunks.values()]
        self.heads = [(number, end - start) for number, (_, start, end) in zip(chunks, self._pieces, strict=True)]

    def __len__(self) -> int:
        return sum(length for _, length in self.heads)

    def slices(self) -> Iterator[list[BlockId]]:
        """Yields copies of the block ids, in slices."""
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
        """Does nothing: no column was replaced."""


class FrozenRequests:
    """Requests as of the moment when they were added here."""

    __slots__ = ("_count", "_frozen")

    def __init__(self) -> None:
        self._frozen: deque[tuple[Any, ...]] = deque()
        self._count = 0

    def add(self, requests: Iterable[Request]) -> tuple[int, int]:
        """Freezes requests and returns the range of their indices. O(requests + blocks in windows)."""
        first = self._count
        self._frozen.extend(map(_freeze, requests))
        self._count = len(self._frozen)
        return first, self._count

    def slices(self) -> Iterator[list[Request]]:
        """Yields copies of the requests, without holdings, in slices and in order of index. Consumes them."""
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
