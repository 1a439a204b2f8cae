"""Accepts connections slowly, from peers that may not be trusted.

1. At most `MAX_HANDSHAKES` connections are in the handshake of TLS. One more ends the oldest of them.
2. A flood takes little of the event loop's time, and leaves each connection time for its handshake: a few connections
   are accepted, then there is a pause.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Final

MAX_HANDSHAKES: Final = 16
ACCEPTED_TOGETHER: Final = 4
ACCEPT_PAUSE_SECONDS: Final = 0.02
"""Pause after each `ACCEPTED_TOGETHER` connections, or after an error: no file descriptor may be left."""
_BACKLOG: Final = 16


class Acceptor:
    """Accepts connections at an address, once `listen` has returned, until `close`.

    Args:
        make_protocol: Makes the protocol of a connection, which gets it after the handshake.
        tls: TLS of the connections; None for plaintext.
        handshake_seconds: Maximum time for a handshake.
    """

    def __init__(
        self, make_protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None, handshake_seconds: float
    ) -> None:
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_seconds = handshake_seconds if tls else None
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._accepting: list[asyncio.Task[None]] = []

    async def listen(self, host: str, port: int) -> int:
        """Begins to accept connections. Returns the port.

        Raises:
            OSError: The address cannot be bound.
        """
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with contextlib.ExitStack() as opened:
            listeners = []
            for family, address in dict.fromkeys((each[0], each[4]) for each in found):
                listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
                listeners.append(opened.enter_context(listener))
                listener.settimeout(0)
            opened.pop_all()
        self._accepting = [asyncio.create_task(self._accept(listener), name="accept") for listener in listeners]
        return int(listeners[0].getsockname()[1])

    def close(self) -> None:
        """Accepts nothing more, and ends the connections in a handshake."""
        for task in (*self._accepting, *self._handshakes):
            task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                with contextlib.suppress(OSError):
                    for _ in range(ACCEPTED_TOGETHER):
                        connection, _ = await loop.sock_accept(listener)
                        self._take(connection)
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)

    def _take(self, connection: socket.socket) -> None:
        if len(self._handshakes) >= MAX_HANDSHAKES:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._shake_hands(connection), name="handshake")
        self._handshakes[task] = None
        task.add_done_callback(lambda _: self._handshakes.pop(task, None))

    async def _shake_hands(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # of the peer: not TLS, or too late
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_seconds
            )
