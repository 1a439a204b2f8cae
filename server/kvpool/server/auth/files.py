"""Files that are reloaded after changes.

1. A file that was replaced by renaming is read at once. A file that was written in place is read a second after the
   last write, as half of it can be valid too. An invalid file never replaces a valid one.
2. After an error the files are read again every second until this succeeds. Descriptors are kept for reading them.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from kvpool.wire.descriptor_reserve import DescriptorReserve

SETTLING_SECONDS: Final = 1.0
"""Minimum time from the last write to a file, in place, until it is read."""
RETRY_SECONDS: Final = 1.0
"""Time between two attempts to read files that cannot be read or are invalid."""

_NUM_RESERVED: Final = 4
"""Descriptors kept for reading the files, which needs one at a time."""

_ValueT = TypeVar("_ValueT")


class _FileStamp(NamedTuple):
    """What tells versions of a file apart; zeros for a file that does not exist."""

    inode: int = 0
    size_bytes: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0


_Stamp: TypeAlias = tuple[_FileStamp, ...]


class ReloadedFiles(Generic[_ValueT]):
    """A value read from files, reloaded when one of them has changed.

    Args:
        paths: The files.
        read: Reads all files. Raises ValueError if they are invalid or cannot be read.
        now_seconds: Returns the time, in seconds since 1970.

    Attributes:
        value: The value; if the files have become invalid, the last valid one.

    Raises:
        ValueError: The files are invalid.
    """

    def __init__(
        self, paths: tuple[Path, ...], read: Callable[[], _ValueT], now_seconds: Callable[[], float] = time.time
    ) -> None:
        self._paths = paths
        self._read = read
        self._reserve = DescriptorReserve(_NUM_RESERVED)
        self._now_seconds = now_seconds
        self._stamp = self._stat()
        self.value = read()
        self._current_seconds = now_seconds()
        self._tried = self._stamp  # the last attempt to read them
        self._tried_seconds = self._current_seconds
        self._error = ""

    @property
    def age_seconds(self) -> float:
        """Time since the files were last found to contain `value`."""
        return max(self._now_seconds() - self._current_seconds, 0.0)

    def refresh(self) -> bool:
        """Reloads the files if they have changed. Returns whether `value` has changed.

        Raises:
            ValueError: The files have changed, and are invalid or cannot be read. Raised once per message.
        """
        stamp, now_seconds = self._stat(), self._now_seconds()
        if stamp != self._stamp:
            failed_now = stamp == self._tried and 0 <= now_seconds - self._tried_seconds < RETRY_SECONDS
            if failed_now or self._is_settling(stamp, now_seconds):
                return False
            self._tried, self._tried_seconds = stamp, now_seconds
            value = self._read_again()
            if value is None or stamp != self._stat():  # else it changed while it was read
                return False
        else:
            value = self.value
        self._stamp, self._current_seconds, self._error = stamp, now_seconds, ""
        changed, self.value = value != self.value, value
        return changed

    def _is_settling(self, stamp: _Stamp, now_seconds: float) -> bool:
        """Whether a file was written in place a moment ago."""
        return any(
            new != old and new.inode == old.inode and 0 <= now_seconds - new.mtime_ns / 1e9 < SETTLING_SECONDS
            for new, old in zip(stamp, self._stamp, strict=True)
        )

    def _read_again(self) -> _ValueT | None:
        """Reads the files. Returns None if the error is that of the attempt before."""
        try:
            with self._reserve.released():
                return self._read()
        except ValueError as error:
            if str(error) == self._error:
                return None
            self._error = str(error)
            raise

    def _stat(self) -> _Stamp:
        def stamp(path: Path) -> _FileStamp:
            try:
                found = path.stat()
            except OSError:
                return _FileStamp()
            return _FileStamp(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

        return tuple(map(stamp, self._paths))
