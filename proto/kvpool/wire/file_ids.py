"""Identity of a file, which a copy of the file does not have.

A counter in the folder would come back with a copy; containers have no second place that outlives them; Kubernetes'
`fsGroup` changes owners, which sets a file's change time.
"""

import ctypes
import errno
import os
import struct
from pathlib import Path
from typing import Final

_AT_FDCWD: Final = -100
_STATX_BTIME: Final = 0x800
_BUFFER_BYTES: Final = 256
_BIRTH_AT: Final = 80
"""Position of `stx_btime` in `struct statx` (statx(2)): seconds, then nanoseconds."""
_NOT_OFFERED: Final = (errno.ENOSYS, errno.EPERM)
"""Errors of a kernel, or of a container's filter of system calls, that has no statx."""


def file_id(path: Path) -> str:
    """Identity of a file: its inode number and the time of its creation, which no program can set.

    Renames, writes and changes of owner and mode keep it. File systems without creation times identify a file by its
    inode number alone, which another file may get later.

    Raises:
        OSError: The file does not exist, or its times cannot be read.
    """
    return f"{path.stat().st_ino}-{_birth_nanoseconds(path)}"


def _birth_nanoseconds(path: Path) -> int:
    """Time of creation; 0 if the system does not offer it. Python's `os.stat` does not on Linux."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    found = ctypes.create_string_buffer(_BUFFER_BYTES)
    if statx is None:
        return 0
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, found):
        number = ctypes.get_errno()
        if number in _NOT_OFFERED:
            return 0
        raise OSError(number, os.strerror(number), str(path))
    (mask,) = struct.unpack_from("=I", found)
    seconds, nanoseconds = struct.unpack_from("=qI", found, _BIRTH_AT)
    return seconds * 10**9 + nanoseconds if mask & _STATX_BTIME else 0
