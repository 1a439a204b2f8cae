"""Other processes of this machine: who they are, what they send, and when they exit."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")
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
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid, started(pid))


def name_senders(listener: socket.socket) -> None:
    """Has each message on a connection name the process that sent it; see `receive_from`."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


async def receive_from(connection: socket.socket, max_bytes: int) -> tuple[bytes, int]:
    """Receives data that one process sent, and the id of this process. Empty data: the end.

    A process that inherited the connection of its parent sends under its own id.
    """
    while True:
        try:
            data, ancillary, _, _ = connection.recvmsg(max_bytes, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            await _readable(connection)
        else:
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    return data, _CREDENTIALS.unpack(content)[0]
            return data, 0


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def wake() -> None:
        loop.remove_reader(connection)
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, wake)
    await readable


def peer_pidfd(connection: socket.socket, pid: int) -> int:
    """Opens a descriptor that becomes readable when the process that connected, with this id, has exited.

    Raises:
        ProcessLookupError: It has exited.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # a kernel before 6.5
        return os.pidfd_open(pid)


def kill(pid: int, started_ticks: int) -> None:
    """Kills a process, unless it has exited."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if started(pid) == started_ticks:  # the descriptor keeps its meaning, the id does not
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def end_with_parent() -> None:
    """Has this process killed when the one that started it exits, if `multiprocessing` started it."""
    if parent := multiprocessing.parent_process():

        def end() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=end, name="kvpool-parent", daemon=True).start()


def started(pid: int) -> int:
    """When a process started, in clock ticks since the start of the machine; 0 if it does not exist.

    With the id it identifies a process: ids are used again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def pid_namespace() -> int:
    """Identifies the namespace in which this process sees the ids of processes."""
    return Path("/proc/self/ns/pid").stat().st_ino
