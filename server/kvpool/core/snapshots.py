"""Parts of a snapshot: the state at one moment, of which the long parts are read while the state changes.

1. A snapshot consists of plain values: numbers, strings, bytes, enums, containers and dataclasses of these. Long parts
   are columns.
2. At its moment, nothing is copied per block: fresh memory for a million entries can take 20 ms. Lists that only grow
   are referred to with their length. Of other lists, an item is copied before it changes (`ColumnCopy`), and so is
   a request (`RequestsCopy`).
   Copies of whole columns take 1 ms per million small ints and 11 ms for hashes, and up to 50 ms in fresh memory.
3. A field that follows from others, or that belongs to the process, is left out, see `left_out`.
"""

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

SLICE_LENGTH: Final = 4096
LEFT_OUT: Final = "left out of snapshots"


def left_out(reason: str) -> dict[str, str]:
    """Metadata of a dataclass field that snapshots leave out; it needs a default."""
    return {LEFT_OUT: reason}


@dataclass(frozen=True, slots=True)
class Column(Generic[_T]):
    """A long part of a snapshot.

    Attributes:
        values: The values; read them once.
        slice_length: Number of values to encode at a time, so that other work does not wait for long; at most
            SLICE_LENGTH.
    """

    values: Iterable[_T]
    slice_length: int = SLICE_LENGTH

    def slices(self) -> Iterator[list[_T]]:
        """Yields the values in slices."""
        values = iter(self.values)
        while piece := list(islice(values, min(self.slice_length, SLICE_LENGTH))):
            yield piece


class ColumnCopy(Generic[_T]):
    """The values that a list has now, to be read while single items of the list change and it grows.

    The owner of the list calls `before_change`. An item that changes before it was read costs one dict entry.
    """

    __slots__ = ("_before", "_length", "_num_read", "_values")

    def __init__(self, values: MutableSequence[_T]) -> None:
        self._values = values
        self._length = len(values)
        self._before: dict[int, _T] = {}
        self._num_read = 0

    def __len__(self) -> int:
        return self._length

    def reads(self, values: MutableSequence[_T]) -> bool:
        """Whether this is the copy of a list."""
        return self._values is values

    def before_change(self, indices: Iterable[int]) -> None:
        """Keeps the values of items that are about to change."""
        for i in indices:
            if i >= self._num_read:
                self._before.setdefault(i, self._values[i])

    def __iter__(self) -> Iterator[_T]:
        return chain.from_iterable(self._pieces())

    def _pieces(self) -> Iterator[Sequence[_T]]:
        for start in range(0, self._length, SLICE_LENGTH):
            piece: Sequence[_T] = self._values[start : min(start + SLICE_LENGTH, self._length)]
            if self._before:
                piece = [self._before.get(i, value) for i, value in enumerate(piece, start)]
            self._num_read = start + len(piece)
            yield piece


def extend(column: MutableSequence[_T], length: int, value: _T) -> None:
    """Extends a column to a length, unless it is longer, with a value."""
    column.extend([value] * (length - len(column)))


def shared(values: Iterable[_T]) -> list[_T]:
    """Returns a list in which equal values are one object, as decoded values are not."""
    found: dict[_T, _T] = {}
    return [found.setdefault(value, value) for value in values]
