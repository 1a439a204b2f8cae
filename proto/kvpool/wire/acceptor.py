"""Accepts connections slowly, from peers that may not be trusted.

1. At most `MAX_HANDSHAKES` connections are in the handshake of TLS. One more ends the oldest of them.
2. A flood takes little of the event loop's time, and leaves each connection time for its handshake or its request: a
   few connections are accepted, then there is a pause.
3. A connection is accepted even if the process has no other file descriptor left.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from kvpool.wire.descriptor_reserve import DescriptorReserve

MAX_HANDSHAKES: Final = 16
ACCEPTED_TOGETHER: Final = 4
ACCEPT_PAUSE_SECONDS: Final = 0.02
"""Pause after each `ACCEPTED_TOGETHER` connections, or after an error."""
_BACKLOG: Final = 128
_NUM_RESERVED: Final = 4
"""Descriptors kept for connections."""


def bound_listeners(host: str, port: int) -> list[socket.socket]:
    """Listens on all addresses of a host name, on one port; as gRPC, accepts that some of them cannot be bound.

    Args:
        host: IP address or host name; empty for all addresses of the machine.
        port: Port to listen on; 0 for a free one.

    Raises:
        OSError: No address can be bound.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    first_error: OSError | None = None
    for family, address in dict.fromkeys((each[0], str(each[4][0])) for each in found):
        try:
            is_dual = address == host == "::" and socket.has_dualstack_ipv6()  # as gRPC's
            listener = socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
        except OSError as error:
            first_error = first_error or error
            continue
        listener.settimeout(0)
        port = listener.getsockname()[1]
        listeners.append(listener)
    if not listeners:
        raise first_error or OSError(f"{host} has no address")
    return listeners


class Acceptor:
    """Accepts connections, once `start` has been called, until `close`.

    Args:
        make_protocol: Makes the protocol of a connection, which gets it after the handshake.
        tls: TLS of the connections; None for plaintext.
        handshake_seconds: Maximum time for a handshake.
        admit: Waits until there is room for an accepted connection; None: there always is.
        pause_seconds: Pause after each `ACCEPTED_TOGETHER` connections, or after an error.

    Attributes:
        reserve: Descriptors for connections. Fill it when a connection ends.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
        handshake_seconds: float | None = None,
        admit: Callable[[], Awaitable[None]] | None = None,
        pause_seconds: float = ACCEPT_PAUSE_SECONDS,
    ) -> None:
        self._pause_seconds = pause_seconds
        self.reserve = DescriptorReserve(_NUM_RESERVED)
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_seconds = handshake_seconds if tls else None
        self._admit = admit
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._accepting: list[asyncio.Task[None]] = []

    async def listen(self, host: str, port: int) -> int:
        """Begins to accept connections at an address. Returns the port.

        Raises:
            OSError: No address of the host can be bound.
        """
        listeners = await asyncio.to_thread(bound_listeners, host, port)  # a name may have to be resolved
        self.start(listeners)
        return int(listeners[0].getsockname()[1])

    def start(self, listeners: list[socket.socket]) -> None:
        """Begins to accept connections of these sockets, and owns them."""
        self._accepting += [asyncio.create_task(self._accept(listener), name="accept") for listener in listeners]

    def close(self) -> None:
        """Accepts nothing more, and ends the connections in a handshake."""
        for task in (*self._accepting, *self._handshakes):
            task.cancel()
        self.reserve.close()

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                for _ in range(ACCEPTED_TOGETHER):
                    connection = await self._next(listener)
                    if connection is None:
                        break
                    await self._take(connection)
                await asyncio.sleep(self._pause_seconds)

    async def _next(self, listener: socket.socket) -> socket.socket | None:
        await _readable(listener)
        try:
            connection, _ = listener.accept()
        except OSError:  # for example, no file descriptor is left
            with contextlib.suppress(OSError), self.reserve.released():
                connection, _ = listener.accept()
                connection.settimeout(0)
                return connection
            return None
        connection.settimeout(0)
        return connection

    async def _take(self, connection: socket.socket) -> None:
        if self._admit:
            try:
                await self._admit()
            except BaseException:
                connection.close()
                raise
        if self._tls is None:
            await self._connect(connection)
            return
        if len(self._handshakes) >= MAX_HANDSHAKES:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._connect(connection), name="handshake")
        self._handshakes[task] = None
        task.add_done_callback(partial(self._end_handshake, connection))

    def _end_handshake(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if task.cancelled():  # maybe before its first line, when nothing else has the connection
            connection.close()

    async def _connect(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # of the peer: not TLS, or too late
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_seconds
            )


async def _readable(listener: socket.socket) -> None:
    """Waits until a connection can be accepted.

    asyncio's `sock_accept` raises an error in the event loop, and loses the connection, if it is cancelled in the
    iteration of the loop in which a connection arrives.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(listener, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(listener)
