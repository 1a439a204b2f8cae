"""The service over gRPC: everything but the I/O, which `blocking_grpc` and `asyncio_grpc` add."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Self, TypeVar

from kvpool.client.lease import LeaseTimer, now_seconds
from kvpool.client.primary_connection import PrimaryConnection
from kvpool.client.retries import LOGGED_AFTER_SECONDS
from kvpool.client.server_link import ServerLink
from kvpool.client.transports import messages
from kvpool.client.transports.step_stream import StepStream
from kvpool.client.transports.transport import EventBatch, OpenedSession, SessionOptions, WatchOptions
from kvpool.client.transports.watches import WatchCall, WatchedShard, begin_watch
from kvpool.core.errors import KvpoolError
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.views.pool_info import PoolInfo
from kvpool.v1 import allocator_pb2
from kvpool.wire import channels
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import ServerError
from kvpool.wire.protocol_version import check_server

_T = TypeVar("_T")


class GrpcTransport(ABC):
    """The service at an address, or at the primary of several. See `Transport`.

    Calls that name a pool accept a time limit in seconds, for a caller that has spent a part of the deadline.

    Attributes:
        deadline_seconds: Time limit of each call, retries included.
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
            address: One address, or several of one shard, separated by commas.
            deadline_seconds: Time limit of each call, retries included.
            access: Credentials. If they name a shard, its servers are learned as they are replaced.

        Raises:
            ValueError: See `kvpool.client.connect`.
        """
        self.deadline_seconds = deadline_seconds
        self._access = access
        self.connection = PrimaryConnection(address, access, self._open_link, is_patient=self.is_patient)
        self.check_usable = self.connection.check
        self.streams: set[StepStream] = set()
        self._is_observing = False

    @property
    def target(self) -> str:
        """See `Service`."""
        return self.connection.target

    def at_shard(self, shard: str, addresses: Sequence[str]) -> Self:
        """Makes a transport to another shard, with the same credentials and deadline. See `__init__` for errors."""
        seeds = ",".join(self._access.allowed(addresses))
        return type(self)(seeds, self.deadline_seconds, self._access.at_shard(shard))

    async def create_pool(self, config: PoolConfig, memory_id: str = "", seconds: float | None = None) -> PoolInfo:
        """See `Transport`."""
        request = messages.create_pool_request(config, memory_id)
        return messages.read_pool(await self._call("CreatePool", request, seconds))

    async def get_pool(self, name: str, seconds: float | None = None) -> PoolInfo:
        """See `Transport`."""
        return messages.read_pool(await self._call("GetPool", allocator_pb2.GetPoolRequest(pool_name=name), seconds))

    async def wait_until_ready(self, name: str, timeout_seconds: float, left_seconds: float | None = None) -> PoolInfo:
        """See `Transport`. A caller that has waited before says how much of the time is left."""
        left_seconds = timeout_seconds if left_seconds is None else left_seconds
        request = allocator_pb2.WaitUntilReadyRequest(pool_name=name, timeout_seconds=left_seconds)
        attempt = partial(self._call_once, attrgetter("allocator.WaitUntilReady"), request)
        answer = await self.connection.call(attempt, left_seconds + self.deadline_seconds, None)
        return messages.check_ready(messages.read_pool(answer), timeout_seconds)

    async def open_session(self, options: SessionOptions, seconds: float | None = None) -> OpenedSession:
        """See `Transport`. From here on the transport keeps the session alive."""
        request = messages.open_session_request(options)
        sent_seconds, response = await self.call_timed("OpenSession", request, seconds)
        try:
            check_server(response.protocol_version)
        except ServerError:
            session_id = response.session.session_id
            with contextlib.suppress(KvpoolError):  # the session ends with its lease
                await self._call("CloseSession", allocator_pb2.CloseSessionRequest(session_id=session_id))
            raise
        return messages.read_session(response, sent_seconds, self, self._drive)

    async def resume_session(
        self, session_id: str, sequence: int, pool: str = "", seconds: float | None = None
    ) -> OpenedSession:
        """See `Transport`. From here on the transport keeps the session alive."""
        del pool
        request = messages.resume_session_request(session_id, sequence)
        sent_seconds, response = await self.call_timed("ResumeSession", request, seconds)
        check_server(response.protocol_version)
        return messages.read_session(response, sent_seconds, self, self._drive)

    async def watch(
        self,
        options: WatchOptions,
        seconds: float | None = None,
        find: Callable[[], Awaitable[WatchedShard]] | None = None,
    ) -> AsyncGenerator[EventBatch]:
        """See `Transport`.

        Args:
            options: See `Transport`.
            seconds: Time limit until the watch is established, if more than one address is known.
            find: Finds the shard of the pool again, for a watch with a snapshot whose shard has lost the pool, or
                cannot be reached.
        """
        self.check_usable()
        return await begin_watch(self, options, seconds or self.deadline_seconds, find)

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
        """Observes the shard from now on, so that a primary which hangs is left, and new servers are known."""
        if (self._access.shard or self.connection.has_others) and not self._is_observing:
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
        """Runs `observe_shard` beside the calls, until `_end_observation`."""

    @abstractmethod
    def _end_observation(self) -> None:
        """Ends it."""

    def _drive(self, session_id: str, lease_timer: LeaseTimer) -> StepStream:
        self.observe()
        stream = self._open_stream(session_id, lease_timer)
        self.streams.add(stream)
        return stream

    async def _call(self, method: str, request: object, seconds: float | None = None) -> Any:  # noqa: ANN401 - any RPC
        return (await self.call_timed(method, request, seconds))[1]

    async def call_timed(self, method: str, request: object, seconds: float | None = None) -> tuple[float, Any]:
        """Makes a call that may be repeated; also returns when the call that was answered was sent."""
        attempt, deadline_seconds = partial(self.call_at, method, request), seconds or self.deadline_seconds
        return await self.connection.call(attempt, deadline_seconds, self.sleep, try_seconds=LOGGED_AFTER_SECONDS)

    async def call_at(
        self, method: str, request: object, link: ServerLink, timeout_seconds: float
    ) -> tuple[float, Any]:
        """Makes one call over a link; also returns when it was sent."""
        sent_seconds = now_seconds()
        call = attrgetter(f"allocator.{method}")
        return sent_seconds, await self._call_once(call, request, link, timeout_seconds)

    async def ask(
        self, method: str, request: object, seconds: float, read: Callable[[Any, str], _T], default: _T
    ) -> _T:
        """Makes a call of DirectoryService, which any server answers.

        Args:
            method: Name of the method.
            request: Its request.
            seconds: Time limit of all attempts.
            read: Makes the result of the answer and the address of the server.
            default: The result if the server is too old to have the method.
        """

        async def attempt(link: ServerLink, timeout_seconds: float) -> _T:
            answer = await self._call_once(attrgetter(f"directory.{method}"), request, link, timeout_seconds)
            return read(answer, link.address)

        try:
            return await self.connection.call(
                attempt, seconds, self.sleep, is_any=True, try_seconds=LOGGED_AFTER_SECONDS
            )
        except ServerError as error:
            if error.reason != "UNIMPLEMENTED":
                raise
            return default
