"""Files of a file system in memory: the allocation of their pages, and their descriptors."""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

_MADV_POPULATE_WRITE: Final = 23
"""Allocates pages as writes would; since Linux 5.14, absent in Python's `mmap`."""
_RANGE_BYTES: Final = 2**30
"""How much memory a thread allocates in one call."""
_MAX_THREADS: Final = 16

_madvise: Final = ctypes.CDLL(None, use_errno=True).madvise  # which lets other threads run, unlike `mmap.madvise`
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def free_bytes(path: Path) -> int | None:
    """Returns how much memory new files can take beside `path`; None if the file system has no limit of its own."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def allocate_pages(descriptor: int, size_bytes: int) -> None:
    """Gives an empty file a size and all of its pages, zeroed: a write to a file without them may kill the process.

    The threads of this call do most of the work, which is to zero pages.

    Raises:
        OSError: The pages do not fit.
    """
    os.ftruncate(descriptor, size_bytes)
    starts = range(0, size_bytes, _RANGE_BYTES)
    num_threads = min(len(starts), len(os.sched_getaffinity(0)), _MAX_THREADS)
    with mmap.mmap(descriptor, size_bytes) as mapped, ThreadPoolExecutor(num_threads) as threads:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

        def populate(start: int) -> int:
            length = min(_RANGE_BYTES, size_bytes - start)
            return ctypes.get_errno() if _madvise(address + start, length, _MADV_POPULATE_WRITE) else 0

        errors = set(threads.map(populate, starts)) - {0}
    if errors == {errno.EINVAL}:  # an older kernel
        os.posix_fallocate(descriptor, 0, size_bytes)
    elif errors:
        number = errno.ENOSPC if errno.EFAULT in errors else errors.pop()
        raise OSError(number, os.strerror(number))


def open_all(paths: Iterable[Path]) -> tuple[int, ...]:
    """Opens files; returns their descriptors, which the caller closes. Raises OSError if one cannot be opened."""
    found: list[int] = []
    try:
        found.extend(os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths)
    except OSError:
        close_all(found)
        raise
    return tuple(found)


def close_all(descriptors: Iterable[int]) -> None:
    """Closes descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
