"""Other processes of this machine: who they are, what they send, and when they exit."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import threading
from pathlib import Path

from kvpool.wire.peer_process import CREDENTIALS, started


async def receive_from(connection: socket.socket, max_bytes: int) -> tuple[bytes, int]:
    """Receives data that one process sent, and the id of this process. Empty data: the end.

    A process that inherited the connection of its parent sends under its own id.
    """
    while True:
        try:
            data, ancillary, _, _ = connection.recvmsg(max_bytes, socket.CMSG_SPACE(CREDENTIALS.size))
        except BlockingIOError:
            await _readable(connection)
        else:
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    return data, CREDENTIALS.unpack(content)[0]
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


def pid_namespace() -> int:
    """Identifies the namespace in which this process sees the ids of processes."""
    return Path("/proc/self/ns/pid").stat().st_ino
