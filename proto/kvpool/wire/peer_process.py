"""The process at the other end of a unix socket."""

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group, as the kernel reports them."""
_SO_PEERPIDFD: Final = 77
"""Option of the kernel since 6.5; absent in Python's `socket`."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a unix socket.

    Attributes:
        pid: Its id; 0 if it is not visible in this process's namespace.
        uid: Its user.
        started_ticks: See `started`.
    """

    pid: int
    uid: int
    started_ticks: int


def peer_of(connection: socket.socket) -> Peer:
    """The process that connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(raw)
    return Peer(pid, uid, started(pid))


def peer_pidfd(connection: socket.socket, pid: int) -> int:
    """Opens a descriptor that becomes readable when the process that connected, with this id, has exited.

    Raises:
        ProcessLookupError: It has exited.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # a kernel before 6.5
        return os.pidfd_open(pid)


def started(pid: int) -> int:
    """When a process started, in clock ticks since the start of the machine; 0 if it does not exist.

    With the id it identifies a process: ids are used again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
