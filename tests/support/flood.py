"""A flood of connections that do not speak the protocol of their port."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Final

HALF_TLS_HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00"


class Flood:
    """Holds connections to a TCP port, as many as it accepts up to a number, and replaces the oldest all the time.

    Attributes:
        is_full: Set when it has made that many connections.
    """

    def __init__(self, address: tuple[str, int], first_bytes: bytes, num_open: int) -> None:
        self._address = address
        self._first_bytes = first_bytes
        self._num_open = num_open
        self._sockets: list[socket.socket] = []
        self._is_over = threading.Event()
        self.is_full = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                opened = socket.create_connection(self._address, timeout=0.2)
            except OSError:  # the port accepts slowly
                continue
            with contextlib.suppress(OSError):  # closed by the server
                opened.sendall(self._first_bytes)
            self._sockets.append(opened)
            if len(self._sockets) > self._num_open:
                self.is_full.set()
                self._sockets.pop(0).close()
                time.sleep(0.001)  # so that the flood leaves processor time to the server in this process

    def end(self) -> None:
        """Closes all connections."""
        self._is_over.set()
        self._thread.join()
        for opened in self._sockets:
            opened.close()


@contextlib.contextmanager
def flooded(address: tuple[str, int], first_bytes: bytes, num_open: int) -> Iterator[Flood]:
    """Floods a port."""
    flood = Flood(address, first_bytes, num_open)
    try:
        yield flood
    finally:
        flood.end()
