"""The lower bound of a step's cost: messages as long as an empty frame, both ways, over a socket as a link has."""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from benchmarks.workloads import Micros, Stopwatch
from kvpool.wire.address import host_and_port

_UNIX: Final = "unix:"
_MESSAGE: Final = bytes(5)


async def serve_echo(addresses: tuple[str, ...], ready: Callable[[list[str]], None]) -> None:
    """Serves connections that echo what they receive."""
    loop, bound = asyncio.get_running_loop(), []
    for address in addresses:
        if address.startswith(_UNIX):
            await loop.create_unix_server(_Echo, address.removeprefix(_UNIX))
            bound.append(address)
        else:
            host, port = host_and_port("address", address)
            server = await loop.create_server(_Echo, host, port)
            bound.append(f"{host}:{server.sockets[0].getsockname()[1]}")
    ready(bound)
    await loop.create_future()


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio promises it
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Echo:
    """Timed round trips over one blocking socket. See `Workload`."""

    def __init__(self, address: str) -> None:
        if address.startswith(_UNIX):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address.removeprefix(_UNIX))
        else:
            self._socket = socket.create_connection(host_and_port("address", address))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._exchange()

    def round(self, count: int) -> Micros:
        """See `Workload`."""
        watch = Stopwatch()
        for _ in range(count):
            watch.time("echo_stream", self._exchange)
        return watch.micros

    def close(self) -> None:
        """See `Workload`."""
        self._socket.close()

    def _exchange(self) -> None:
        self._socket.sendall(_MESSAGE)
        self._socket.recv(len(_MESSAGE), socket.MSG_WAITALL)
