"""Links as the calls of a session: over a blocking socket, and over asyncio."""

import asyncio
import contextlib
import select
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from kvpool.core.errors import KvpoolError
from kvpool.wire import link as wire_link
from kvpool.wire.address import host_and_port, set_options
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import ServerError
from kvpool.wire.frames import FrameReader, encode_frame

_CHUNK_BYTES: Final = 2**16
_DEAD_PEER_SECONDS: Final = 6.0
"""Time in which a server's machine that is away is noticed, as on gRPC's channels."""
_NEXT_ADDRESS_SECONDS: Final = 0.25
"""Time after which the next address of a host is tried, too."""
_UNIX: Final = "unix:"

_FIRST_STATE: Final = wire_link.client_state(is_probed=True)

Refusal = Callable[[bytes], KvpoolError]
"""Makes the error of a refusal."""


class _Answers(FrameReader):
    """The answers of a server on one link. The welcome counts as one.

    Attributes:
        payloads: The answers that have arrived, and were not taken.
    """

    __slots__ = ("_refusal", "payloads")

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(_FIRST_STATE)
        self.payloads: deque[bytes] = deque()
        self._refusal = refusal

    def take(self, data: bytes) -> None:
        """Takes received bytes. Raises the error of a refusal, or for what is no answer."""
        try:
            frames = self.feed(data)
        except KvpoolError as error:  # no refusal of the server's, which would have changed nothing
            raise ServerError(error.reason, error.message) from None
        for kind, payload in frames:
            if kind == wire_link.Kind.REFUSED:
                raise self._refusal(payload)
            self.payloads.append(payload)


class _LinkCall(ABC):
    """What links have in common; see `LinkCall`."""

    is_link = True

    def __init__(self, refusal: Refusal) -> None:
        self._answers = _Answers(refusal)
        self._error: Exception | None = None
        """What follows the answers."""

    def send(self, step: bytes, due_seconds: float) -> None:
        """See `StepCall`."""
        self.write(encode_frame(wire_link.Kind.REQUEST, step), due_seconds)

    @abstractmethod
    def write(self, data: bytes, due_seconds: float) -> None:
        """See `LinkCall`."""


class SocketCall(_LinkCall):
    """A link over a blocking socket. One thread sends and receives, and any thread may cancel."""

    def __init__(self, connection: socket.socket, refusal: Refusal) -> None:
        super().__init__(refusal)
        self._socket = connection
        self._lock = threading.Lock()
        self._is_used = False
        self._is_over = False
        self._send_error: OSError | None = None

    def fileno(self) -> int:
        """The descriptor, to wait for the end of the link; -1 after it."""
        return self._socket.fileno()

    def write(self, data: bytes, due_seconds: float) -> None:
        """See `LinkCall`."""
        with self._lock:
            self._is_used = True
        try:
            self._socket.settimeout(max(due_seconds - time.monotonic(), 0.001))
            self._socket.sendall(data)
        except OSError as error:  # the server may have refused before it closed the connection
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            self._send_error = error
        finally:
            self._end()

    def has_answer(self) -> bool:
        """See `StepCall`."""
        if self._answers.payloads or self._error:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    async def receive(self, due_seconds: float) -> bytes:
        """See `StepCall`."""
        connection, answers = self._socket, self._answers
        with self._lock:
            self._is_used = True
        try:
            while not answers.payloads:
                if self._error:
                    raise self._error
                connection.settimeout(max(due_seconds - time.monotonic(), 0.001))
                data = connection.recv(_CHUNK_BYTES)
                if not data:
                    raise self._send_error or ConnectionResetError
                try:
                    answers.take(data)
                except KvpoolError as error:
                    self._error = error
            return answers.payloads.popleft()
        finally:
            self._end()

    def cancel(self) -> None:
        """See `StepCall`. A thread that uses the socket closes it afterwards: its descriptor may get another use."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            with contextlib.suppress(OSError):  # not the method of `ssl`, which would let others write plaintext
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            if not self._is_used:
                self._socket.close()

    def _end(self) -> None:
        with self._lock:
            self._is_used = False
            if self._is_over:
                self._socket.close()


class AsyncioCall(_LinkCall, asyncio.Protocol):
    """A link over asyncio. Belongs to one event loop."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self._arrival: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio promises it
        self._transport = transport
        set_options(transport.get_extra_info("socket"), _DEAD_PEER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        try:
            self._answers.take(data)
        except KvpoolError as error:
            self._error = self._error or error
        self._wake()

    def connection_lost(self, _: Exception | None) -> None:
        """See asyncio."""
        self._error = self._error or ConnectionResetError()
        self._wake()

    def write(self, data: bytes, due_seconds: float) -> None:
        """See `LinkCall`."""
        del due_seconds
        self._transport.write(data)

    def has_answer(self) -> bool:
        """See `StepCall`."""
        return bool(self._answers.payloads or self._error)

    async def receive(self, due_seconds: float) -> bytes:
        """See `StepCall`."""
        async with asyncio.timeout(due_seconds - time.monotonic()):
            while not self._answers.payloads:
                if self._error:
                    raise self._error
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
            return self._answers.payloads.popleft()

    def cancel(self) -> None:
        """See `StepCall`."""
        self._transport.abort()

    def _wake(self) -> None:
        if self._arrival and not self._arrival.done():
            self._arrival.set_result(None)


def open_socket(address: str, access: ClientCredentials, due_seconds: float) -> socket.socket:
    """Connects to a listener of links.

    Raises:
        OSError: It cannot be reached, or its certificate is not trusted.
        ValueError: A file of the credentials cannot be read.
    """
    timeout_seconds = max(due_seconds - time.monotonic(), 0.001)
    if address.startswith(_UNIX):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout_seconds)
            connection.connect(address.removeprefix(_UNIX))
        except BaseException:
            connection.close()
            raise
        return connection
    host, port = host_and_port("address", address)
    connection = socket.create_connection((host, port), timeout_seconds)
    try:
        set_options(connection, _DEAD_PEER_SECONDS)
        context, name = tls_of(access, host)
        return context.wrap_socket(connection, server_hostname=name) if context else connection
    except BaseException:
        connection.close()
        raise


async def open_protocol(address: str, access: ClientCredentials, call: AsyncioCall) -> None:
    """Connects a protocol to a listener of links. Raises as `open_socket`."""
    loop = asyncio.get_running_loop()
    if address.startswith(_UNIX):
        await loop.create_unix_connection(lambda: call, address.removeprefix(_UNIX))
        return
    host, port = host_and_port("address", address)
    context, name = tls_of(access, host)
    await loop.create_connection(
        lambda: call,
        host,
        port,
        ssl=context,
        server_hostname=name if context else None,
        happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS,
    )


def tls_of(access: ClientCredentials, host: str) -> tuple[ssl.SSLContext | None, str]:
    """The context of TLS, and the name that the server's certificate must have; None for plaintext."""
    return (access.tls.context(), access.tls.server_name or host) if access.tls else (None, "")
