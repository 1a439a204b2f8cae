"""A file that is read again when it has changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_ValueT = TypeVar("_ValueT")
_Stamp = tuple[tuple[int, int, int, int], ...]


class Reloaded(Generic[_ValueT]):
    """What some files say, and after a change of any of them what they say now.

    Args:
        paths: The files.
        read: Reads them all; ValueError if they are not good, together.

    Attributes:
        value: What they say; what they said last, if they are no good now.

    Raises:
        ValueError: They are no good from the start.
    """

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], _ValueT]) -> None:
        self._paths = paths
        self._read = read
        self._stamp = self._look()
        self.value = read()

    def refresh(self) -> bool:
        """Reads them again if they have changed since; returns whether `value` is another.

        Raises:
            ValueError: They have changed and are no good; said once for each change.
        """
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp  # before they are read: what changes meanwhile is another change
        value = self._read()
        changed, self.value = value != self.value, value
        return changed

    def _look(self) -> _Stamp:
        def stamp(path: Path) -> tuple[int, int, int, int]:
            try:
                found = path.stat()
            except OSError:
                return (0, 0, 0, 0)
            return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode

        return tuple(map(stamp, self._paths))
