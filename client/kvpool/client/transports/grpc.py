"""The service over gRPC: everything but the I/O, which `blocking_grpc` and `asyncio_grpc` add."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import grpc

from kvpool.client.lease import LeaseTimer, now_seconds
from kvpool.client.primary_connection import REPLACED, PrimaryConnection
from kvpool.client.retries import LOGGED_AFTER_SECONDS
from kvpool.client.server_link import ServerLink
from kvpool.client.transports import messages
from kvpool.client.transports.step_stream import StepStream
from kvpool.client.transports.transport import EventBatch, OpenedSession, SessionOptions, WatchOptions
from kvpool.client.transports.watches import WatchCall, begin_watch
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.v1 import allocator_pb2
from kvpool.v1.pool_pb2 import PoolInfo
from kvpool.wire import channels
from kvpool.wire.backoff import Backoff
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import ServerError, not_sent_error
from kvpool.wire.protocol_version import check_server


class GrpcTransport(ABC):
    """The service at an address, or at the primary of several. See `Transport`.

    Attributes:
        deadline_seconds: Time limit of each call, retries included.
        access: Credentials.
        connection: The connection to the primary.
        check_usable: See `Transport`.
        streams: The streams of the sessions that it keeps alive.
        is_patient: Whether it repeats calls, and waits for servers.
        channel_options: Options of its channels.
    """

    is_patient: ClassVar[bool] = True
    channel_options: ClassVar[channels.Options] = channels.SESSION_CHANNEL_OPTIONS

    def __init__(self, address: str, deadline_seconds: float, access: ClientCredentials) -> None:
        """Makes the transport. It connects at the first call.

        Args:
            address: One address, or those of a primary and its standbys, separated by commas.
            deadline_seconds: Time limit of each call, retries included.
            access: Credentials.

        Raises:
            ValueError: See `kvpool.client.connect`.
        """
        self.deadline_seconds = deadline_seconds
        self.access = access
        self.connection = PrimaryConnection(address, access, self._open_link, is_patient=self.is_patient)
        self.check_usable = self.connection.check
        self.streams: set[StepStream] = set()
        self._is_observing = False

    @property
    def target(self) -> str:
        """See `Transport`."""
        return self.connection.target

    async def create_pool(self, config: PoolConfig, memory_id: str = "") -> PoolInfo:
        """See `Transport`."""
        request = messages.create_pool_request(config, memory_id)
        pool: PoolInfo = (await self._call("CreatePool", request)).pool
        return pool

    async def get_pool(self, name: str) -> PoolInfo:
        """See `Transport`."""
        pool: PoolInfo = (await self._call("GetPool", allocator_pb2.GetPoolRequest(pool_name=name))).pool
        return pool

    async def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """See `Transport`. Waits for a server that starts or restarts, too."""
        due_seconds = time.monotonic() + timeout_seconds
        left_seconds, backoff = timeout_seconds, Backoff(0.1, 0.5)
        while True:
            request = allocator_pb2.WaitUntilReadyRequest(pool_name=name, timeout_seconds=left_seconds)
            attempt = partial(self._call_once, attrgetter("allocator.WaitUntilReady"), request)
            try:
                answer = await self.connection.call(attempt, left_seconds + self.deadline_seconds, None)
                return messages.check_ready(answer.pool, timeout_seconds)
            except UnavailableError as error:
                left_seconds = due_seconds - time.monotonic()
                if left_seconds <= 0:
                    raise
                pause_seconds = min(backoff.next(error.retry_seconds or None), left_seconds)
            await self.sleep(pause_seconds)
            left_seconds = max(due_seconds - time.monotonic(), 0.0)

    async def open_session(self, options: SessionOptions) -> OpenedSession:
        """See `Transport`. From here on the transport keeps the session alive."""
        request = messages.open_session_request(options)
        sent_seconds, response = await self.call_timed("OpenSession", request)
        try:
            check_server(response.protocol_version)
        except ServerError:
            session_id = response.session.session_id
            with contextlib.suppress(KvpoolError):  # the session ends with its lease
                await self._call("CloseSession", allocator_pb2.CloseSessionRequest(session_id=session_id))
            raise
        opened = messages.read_session(response, sent_seconds, self, self._drive)
        try:
            with contextlib.suppress(KvpoolError):  # the first step reports it
                link = await self.connection.link()
                link.step_listener = response.step_listener  # if another server answered, the one called is asked
            await opened.calls.prepare()
        except BaseException:  # the caller has no session that it could close
            opened.calls.forget()
            raise
        return opened

    async def watch(self, options: WatchOptions) -> AsyncGenerator[EventBatch]:
        """See `Transport`."""
        self.check_usable()
        return await begin_watch(self, options, self.deadline_seconds)

    async def close(self) -> None:
        """See `Transport`. In a forked process it does nothing: the connection is that of the other process."""
        if not self.connection.end():
            return
        for stream in list(self.streams):  # a call in another thread may forget one
            stream.end()
        self.streams.clear()
        self._end_observation()
        await self.connection.close_links()

    def observe(self) -> None:
        """Observes the servers from now on, so that a primary which hangs is left, and new servers are known."""
        if self.connection.has_others and not self._is_observing:
            self._is_observing = True
            self._start_observation()

    @abstractmethod
    def _open_link(self, address: str) -> ServerLink:
        """Makes a connection to a server."""

    @abstractmethod
    async def _call_once(
        self, method: Callable[[ServerLink], Any], request: object, link: ServerLink, timeout_seconds: float
    ) -> Any:  # noqa: ANN401 - any RPC
        """Makes a unary call, of a method of a stub of the link. Calls `check_usable` first."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Waits. The end of the transport may end it early."""

    @abstractmethod
    def open_watch(
        self, link: ServerLink, stub: str, request: object, silence_seconds: float | None = None
    ) -> WatchCall:
        """Starts a call of Watch of a stub of the link."""

    @abstractmethod
    def _open_stream(self, session_id: str, lease_timer: LeaseTimer) -> StepStream:
        """Makes a session's stream, and starts to keep the session alive."""

    @abstractmethod
    def _start_observation(self) -> None:
        """Runs `observe_servers` beside the calls, until `_end_observation`."""

    @abstractmethod
    def _end_observation(self) -> None:
        """Ends it."""

    def _drive(self, session_id: str, lease_timer: LeaseTimer) -> StepStream:
        self.observe()
        stream = self._open_stream(session_id, lease_timer)
        self.streams.add(stream)
        return stream

    async def _call(self, method: str, request: object) -> Any:  # noqa: ANN401 - any RPC
        return (await self.call_timed(method, request))[1]

    async def call_timed(self, method: str, request: object) -> tuple[float, Any]:
        """Makes a call that may be repeated; also returns when the call that was answered was sent."""
        attempt = partial(self.call_at, method, request)
        return await self.connection.call(attempt, self.deadline_seconds, self.sleep, try_seconds=LOGGED_AFTER_SECONDS)

    async def call_at(
        self, method: str, request: object, link: ServerLink, timeout_seconds: float
    ) -> tuple[float, Any]:
        """Makes one call over a link; also returns when it was sent."""
        sent_seconds = now_seconds()
        call = attrgetter(f"allocator.{method}")
        return sent_seconds, await self._call_once(call, request, link, timeout_seconds)


@contextlib.contextmanager
def on_open_channel(connection: PrimaryConnection, link: ServerLink) -> Iterator[None]:
    """Converts the error of a call on a channel that another thread or task has just closed."""
    try:
        yield
    except (ValueError, grpc.aio.UsageError):
        connection.check()
        if connection.is_replaced(link):
            raise not_sent_error(*REPLACED) from None
        raise
