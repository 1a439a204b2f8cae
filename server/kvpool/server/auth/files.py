"""Files that are reloaded after changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_ValueT = TypeVar("_ValueT")
_Stamp = tuple[tuple[int, int, int, int], ...]


class ReloadedFiles(Generic[_ValueT]):
    """A value read from files, reloaded when one of them has changed.

    Args:
        paths: The files.
        read: Reads all files. Raises ValueError if they are invalid.

    Attributes:
        value: The value; if the files have become invalid, the last valid one.

    Raises:
        ValueError: The files are invalid.
    """

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], _ValueT]) -> None:
        self._paths = paths
        self._read = read
        self._stamp = self._stat()
        self.value = read()

    def refresh(self) -> bool:
        """Reloads the files if they have changed. Returns whether `value` has changed.

        Raises:
            ValueError: The files have changed and are invalid. Raised once per change.
        """
        stamp = self._stat()
        if stamp == self._stamp:
            return False
        self._stamp = stamp  # taken before reading: a change during the read counts as a new one
        value = self._read()
        changed, self.value = value != self.value, value
        return changed

    def _stat(self) -> _Stamp:
        def stamp(path: Path) -> tuple[int, int, int, int]:
            try:
                found = path.stat()
            except OSError:
                return (0, 0, 0, 0)
            return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode

        return tuple(map(stamp, self._paths))
