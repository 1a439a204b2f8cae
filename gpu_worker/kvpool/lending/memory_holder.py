"""A process that holds the descriptor of a rank's memory, so that memory on a GPU outlives its worker.

1. It never uses the device: the descriptor alone keeps the memory.
2. It serves one worker at a time, on a socket in the rank's private folder. It sends a worker that connects what it
   holds. The worker replaces that (a name and a descriptor) or drops it (a message without a descriptor).
3. It ends when the memory is dropped, or when no worker has been connected for `LINGER_SECONDS`, so that the memory of
   a worker that never comes back is free in the end.

The worker starts it, in a session of its own and without any of its files: an open file of the device would keep the
context of a killed worker. What kills all processes of the worker's container or control group also kills the holder.
The memory is then lost, as it would be without a holder.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

LINGER_SECONDS: Final = 600.0
_SOCKET: Final = "holder"
_NAME_BYTES: Final = 64
_TIMEOUT_SECONDS: Final = 5.0


class MemoryHolder:
    """A worker's connection to the holder of its rank.

    Attributes:
        name: Name of the memory that was held when the worker connected; empty if there was none.
        descriptor: That memory, which the caller closes; -1 if there was none.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Use `connect` or `start`. Raises OSError if the holder does not answer."""
        connection.settimeout(_TIMEOUT_SECONDS)
        self._connection: Final = connection
        name, descriptors, _, _ = socket.recv_fds(connection, _NAME_BYTES, 1)
        if not name:
            raise ConnectionError("the process that holds the memory has ended")
        self.name: Final = name.decode() if descriptors else ""
        self.descriptor: Final = descriptors[0] if descriptors else -1

    @classmethod
    def connect(cls, folder: Path) -> Self | None:
        """Connects to the holder of an earlier worker; returns None if there is none."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _short(folder) as path:
                connection.connect(path)
            return cls(connection)
        except OSError:
            connection.close()
            return None

    @classmethod
    def start(cls, folder: Path) -> Self:
        """Starts a holder. Raises OSError or subprocess.SubprocessError if it cannot be started."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            (folder / _SOCKET).unlink(missing_ok=True)
            with _short(folder) as path:
                listener.bind(path)
            listener.listen(1)
            number = listener.fileno()
            subprocess.run(  # noqa: S603 - this program, which needs no package
                [sys.executable, "-I", __file__, str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a reader of the worker's log sees its end
                cwd="/",
                start_new_session=True,
                check=True,
            )
        started = cls.connect(folder)
        if started is None:
            raise ConnectionError("the process that holds the memory ended at its start")
        return started

    def hold(self, name: str, descriptor: int) -> None:
        """Has it hold memory in place of what it held. Raises OSError if it is gone."""
        socket.send_fds(self._connection, [name.encode()], [descriptor])
        if not self._connection.recv(_NAME_BYTES):
            raise ConnectionError("the process that holds the memory has ended")

    def drop(self) -> None:
        """Has it drop the memory, and end."""
        with contextlib.suppress(OSError):
            self._connection.send(b"drop")
            self._connection.recv(_NAME_BYTES)
        self.close()

    def close(self) -> None:
        """Ends the connection; the memory stays held."""
        self._connection.close()


def hold_for_workers(listener: socket.socket, linger_seconds: float = LINGER_SECONDS) -> None:
    """Serves workers, one at a time, until one drops the memory or none has come for a while."""
    listener.settimeout(linger_seconds)
    name, descriptor = b"-", -1
    while True:
        try:
            worker, _ = listener.accept()
        except TimeoutError:
            return
        with worker, contextlib.suppress(OSError):  # the worker has been killed
            worker.settimeout(None)
            socket.send_fds(worker, [name], [descriptor] if descriptor >= 0 else [])
            while True:
                message, descriptors, _, _ = socket.recv_fds(worker, _NAME_BYTES, 1)
                if not message:
                    break
                if descriptor >= 0:
                    os.close(descriptor)
                if not descriptors:
                    return
                name, descriptor = message, descriptors[0]
                worker.send(b"held")


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A path of the socket that fits an address, however long the path of the folder is."""
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{number}/{_SOCKET}"
    finally:
        os.close(number)


if __name__ == "__main__":
    if os.fork():  # the worker waits for this process, and need not wait for the other one
        os._exit(0)
    hold_for_workers(socket.socket(fileno=int(sys.argv[1])))
