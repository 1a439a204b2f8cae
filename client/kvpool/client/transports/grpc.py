"""The service over gRPC: everything but the I/O, which `blocking_grpc` and `asyncio_grpc` add."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from math import inf
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from kvpool.client import retries
from kvpool.client.lease import now_seconds
from kvpool.client.primary_connection import PrimaryConnection
from kvpool.client.transports import messages
from kvpool.client.transports.resumable_watch import ResumableWatch
from kvpool.client.transports.step_stream import ServerLink, StepStream, closed_session_error
from kvpool.client.transports.transport import EventBatch, OpenedSession, SessionOptions, WatchOptions
from kvpool.core.errors import (
    KvpoolError,
    UnavailableError,
    WrongStateError,
)
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Step, StepResult
from kvpool.core.views.pool_info import PoolInfo
from kvpool.v1 import allocator_pb2, directory_pb2, event_pb2
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import ServerError
from kvpool.wire.protocol_version import check_server
from kvpool.wire.seeds import PrimarySearch, ShardAddress

_WAIT_PAUSE_SECONDS: Final = 0.2
"""Pause before an unreachable server is called again, while the client waits for a pool."""
_OBSERVATION_PAUSE_SECONDS: Final = 1.0
"""Pause before another server is observed, when one cannot be observed any more."""


class WatchCall(Protocol):
    """A call of Watch."""

    async def read(self) -> event_pb2.WatchResponse:
        """Waits for the next message, at most `ResumableWatch.silence_seconds`."""

    def cancel(self) -> object:
        """Ends the call."""


_LinkT = TypeVar("_LinkT", bound=ServerLink)
_T = TypeVar("_T")


class GrpcTransport(ABC, Generic[_LinkT]):
    """The service at an address, or at the primary of several. See `Transport`.

    Calls that name a pool accept a time limit in seconds, for a caller that has spent a part of the deadline.

    Attributes:
        deadline_seconds: Time limit of each call, retries included.
    """

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
        self._connection: PrimaryConnection[_LinkT] = PrimaryConnection(address, access, self._open_link)
        self._streams: dict[str, StepStream[_LinkT]] = {}
        self._is_observing = False

    def check_usable(self) -> None:
        """See `Transport`."""
        self._connection.check()

    def at_shard(self, shard: str, addresses: Sequence[str]) -> Self:
        """Makes a transport to another shard, with the same credentials and deadline. Raises as the constructor."""
        seeds = ",".join(self._access.allowed(addresses))
        return type(self)(seeds, self.deadline_seconds, self._access.at_shard(shard))

    def learn_members(self, addresses: Sequence[str]) -> None:
        """Notes the addresses of the shard's servers."""
        self._connection.learn_members(addresses)

    async def locate(self, pool: str, seconds: float) -> ShardAddress:
        """Asks any server for the shard of a pool. Raises NotFoundError if no shard has it."""
        return await self._ask("Locate", directory_pb2.LocateRequest(pool_name=pool), seconds, _location)

    async def place(self, pool: str, zone: str, seconds: float) -> ShardAddress:
        """Asks any server for the shard of a pool, and to choose one if it has none."""
        return await self._ask("Place", directory_pb2.PlaceRequest(pool_name=pool, zone=zone), seconds, _location)

    async def list_shards(self, seconds: float) -> list[ShardAddress]:
        """Asks any server for the shards that have had a primary."""
        return await self._ask("ListShards", directory_pb2.ListShardsRequest(), seconds, _locations)

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
        due_seconds = time.monotonic() + left_seconds
        search = self._connection.new_search()
        while True:
            request = allocator_pb2.WaitUntilReadyRequest(pool_name=name, timeout_seconds=left_seconds)
            try:
                attempt = partial(self._call_once, "allocator", "WaitUntilReady", request)
                answer = await self._connection.call(attempt, search, left_seconds + self.deadline_seconds)
                return messages.check_ready(messages.read_pool(answer), timeout_seconds)
            except UnavailableError as error:
                left_seconds = due_seconds - time.monotonic()
                if left_seconds <= 0:
                    raise
                pause_seconds = min(error.retry_seconds or _WAIT_PAUSE_SECONDS, left_seconds)
            await self.sleep(pause_seconds)
            left_seconds = max(due_seconds - time.monotonic(), 0.0)

    async def open_session(self, options: SessionOptions, seconds: float | None = None) -> OpenedSession:
        """See `Transport`. From here on the transport keeps the session alive."""
        request = messages.open_session_request(options)
        sent_seconds, response = await self._call_timed("OpenSession", request, seconds)
        try:
            check_server(response.protocol_version)
        except ServerError:
            session_id = response.session.session_id
            with contextlib.suppress(KvpoolError):  # the session ends with its lease
                await self._call("CloseSession", allocator_pb2.CloseSessionRequest(session_id=session_id))
            raise
        return self._drive(messages.read_session(response, sent_seconds, self))

    async def resume_session(
        self, session_id: str, sequence: int, pool: str = "", seconds: float | None = None
    ) -> OpenedSession:
        """See `Transport`. From here on the transport keeps the session alive."""
        del pool
        request = messages.resume_session_request(session_id, sequence)
        sent_seconds, response = await self._call_timed("ResumeSession", request, seconds)
        check_server(response.protocol_version)
        return self._drive(messages.read_session(response, sent_seconds, self))

    def apply(self, session_id: str, step: Step) -> Coroutine[Any, Any, StepResult]:
        """See `Transport`."""
        return self._stream(session_id).exchange(step)

    async def send(self, session_id: str, step: Step) -> None:
        """See `Transport`."""
        self.check_usable()
        stream = self._streams.get(session_id)
        if stream:
            await stream.send_ahead(step)

    async def mark_executed(self, session_id: str, executed_sequence: int) -> None:
        """See `Transport`."""
        request = allocator_pb2.MarkExecutedRequest(session_id=session_id, executed_sequence=executed_sequence)
        sent_seconds, _ = await self._call_timed("MarkExecuted", request)
        self._stream(session_id).lease_timer.renew(sent_seconds)

    async def set_weights_version(self, session_id: str, weights_version: str) -> None:
        """See `Transport`."""
        request = messages.set_weights_version_request(session_id, weights_version)
        sent_seconds, _ = await self._call_timed("SetWeightsVersion", request)
        self._stream(session_id).lease_timer.renew(sent_seconds)

    async def close_session(self, session_id: str) -> None:
        """See `Transport`."""
        self.check_usable()
        if session_id in self._streams:  # else it has ended, and the server answers how
            self._streams[session_id].close()
        await self._call("CloseSession", allocator_pb2.CloseSessionRequest(session_id=session_id))

    def forget(self, session_id: str) -> None:
        """See `Transport`."""
        stream = self._streams.pop(session_id, None)
        if stream:
            stream.close()

    async def watch(
        self,
        options: WatchOptions,
        seconds: float | None = None,
        find: Callable[[], Awaitable["GrpcTransport[_LinkT]"]] | None = None,
    ) -> AsyncGenerator[EventBatch]:
        """See `Transport`.

        Args:
            options: See `Transport`.
            seconds: Time limit until the watch is established, if more than one address is known.
            find: Finds the shard of the pool again, for a watch with a snapshot whose shard has lost the pool, or
                cannot be reached.
        """
        self.check_usable()
        state = ResumableWatch(options)
        begin = partial(self._begin_watch, state)
        self._observe()
        if self._connection.has_others:
            once = partial(self._connection.call, begin, self._connection.new_search())
            link, call, first = await retries.call(once, seconds or self.deadline_seconds, self.sleep)
        else:
            link, call, first = await self._connection.call(begin, self._connection.new_search(), inf)
        return self._batches(state, link, call, first, find)

    async def _begin_watch(
        self, state: ResumableWatch, link: _LinkT, timeout_seconds: float
    ) -> tuple[_LinkT, WatchCall, event_pb2.WatchResponse]:
        """Starts a watch. The connection limits its time: a watch has no deadline."""
        del timeout_seconds
        call = self._start_watch(link, state)
        try:
            return link, call, await call.read()
        except BaseException as error:
            call.cancel()
            if isinstance(error, KvpoolError):
                self.check_usable()  # closed meanwhile
            raise

    async def _batches(
        self,
        state: ResumableWatch,
        link: _LinkT,
        call: WatchCall,
        message: event_pb2.WatchResponse | None,
        find: Callable[[], Awaitable["GrpcTransport[_LinkT]"]] | None,
    ) -> AsyncGenerator[EventBatch]:
        address, search = link.address, self._connection.new_search()
        while True:
            try:
                try:
                    while True:
                        batch = state.read(message or await call.read())
                        message = None
                        if batch:
                            yield batch
                            self.check_usable()
                            search = self._connection.new_search()
                finally:
                    call.cancel()
            except KvpoolError as error:
                self.check_usable()
                pause_seconds, is_lost = state.pause_seconds(error), False
                try:
                    self._connection.next_target(search, address, error)
                except KvpoolError:  # the watch never ends, and has its own pauses
                    is_lost = True
            await self.sleep(pause_seconds)
            self.check_usable()
            shard = self
            if is_lost and find:
                with contextlib.suppress(KvpoolError):
                    shard = await find()
            if shard is not self:
                async with contextlib.aclosing(shard.resume_watch(state, find)) as batches:
                    async for batch in batches:
                        yield batch
                return
            link = await self._connection.link()
            address, call = link.address, self._start_watch(link, state)

    async def resume_watch(
        self, state: ResumableWatch, find: Callable[[], Awaitable["GrpcTransport[_LinkT]"]] | None
    ) -> AsyncGenerator[EventBatch]:
        """Continues a watch that began at another shard. See `watch`."""
        self._observe()
        link = await self._connection.link()
        async with contextlib.aclosing(
            self._batches(state, link, self._start_watch(link, state), None, find)
        ) as batches:
            async for batch in batches:
                yield batch

    async def close(self) -> None:
        """See `Transport`. In a forked process it does nothing: the connection is that of the other process."""
        if not self._connection.end():
            return
        for stream in list(self._streams.values()):  # a call in another thread may forget one
            stream.close()
        self._streams.clear()
        self._end_observation()
        await self._connection.close_links()

    async def renew(self, session_id: str, timeout_seconds: float) -> float:
        """Extends the lease of a session; returns when the call that was answered was sent."""
        request = allocator_pb2.KeepAliveRequest(session_id=session_id)
        attempt = partial(self._call_at, "allocator", "KeepAlive", request)
        search = self._connection.new_search()
        sent_seconds, _ = await self._connection.call(attempt, search, timeout_seconds, timeout_seconds / 2)
        return sent_seconds

    @abstractmethod
    def _open_link(self, address: str) -> _LinkT:
        """Makes a connection to a server."""

    @abstractmethod
    async def _call_once(self, stub: str, method: str, request: object, link: _LinkT, timeout_seconds: float) -> Any:  # noqa: ANN401 - any RPC
        """Makes a unary call of a stub of the link. Calls `check_usable` first."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Waits."""

    @abstractmethod
    def _open_stream(self, opened: OpenedSession) -> "StepStream[_LinkT]":
        """Makes a session's stream, and starts to keep the session alive."""

    @abstractmethod
    def _start_watch(self, link: _LinkT, state: ResumableWatch) -> WatchCall:
        """Starts the next call of a watch."""

    @abstractmethod
    def _start_observation(self) -> None:
        """Runs `_observe_others` beside the calls."""

    @abstractmethod
    def _end_observation(self) -> None:
        """Ends it."""

    @abstractmethod
    def _watch_shard(self, link: _LinkT) -> Callable[[], Awaitable[directory_pb2.Shard]]:
        """Watches the shard of a server; returns a function that waits for the next message."""

    def _observe(self) -> None:
        """Observes the shard from now on, so that a primary which hangs is left, and new servers are known."""
        if (self._access.shard or self._connection.has_others) and not self._is_observing:
            self._is_observing = True
            self._start_observation()

    async def _observe_others(self, sleep: Callable[[float], Awaitable[object]]) -> None:
        """Observes the shard until the client is closed."""
        with contextlib.suppress(WrongStateError):  # closed
            while True:
                if not await self._connection.observe(self._watch_shard):
                    await sleep(_OBSERVATION_PAUSE_SECONDS)

    def _drive(self, opened: OpenedSession) -> OpenedSession:
        self._observe()
        self._streams[opened.session_id] = self._open_stream(opened)
        return opened

    def _stream(self, session_id: str) -> "StepStream[_LinkT]":
        self.check_usable()
        stream = self._streams.get(session_id)
        if stream is None:
            raise closed_session_error()
        return stream

    async def _call(self, method: str, request: object, seconds: float | None = None) -> Any:  # noqa: ANN401 - any RPC
        return (await self._call_timed(method, request, seconds))[1]

    async def _call_timed(self, method: str, request: object, seconds: float | None = None) -> tuple[float, Any]:
        """Makes a call that may be repeated; also returns when the call that was answered was sent."""
        attempt = partial(self._call_at, "allocator", method, request)
        return await self._repeat(attempt, self._connection.new_search(), seconds or self.deadline_seconds)

    async def _ask(self, method: str, request: object, seconds: float, read: Callable[[Any, str], _T]) -> _T:
        """Makes a call of DirectoryService, which any server answers."""

        async def attempt(link: _LinkT, timeout_seconds: float) -> _T:
            answer = await self._call_once("directory", method, request, link, timeout_seconds)
            return read(answer, link.address)

        return await self._repeat(attempt, self._connection.new_search(is_any=True), seconds)

    async def _repeat(
        self, attempt: Callable[[_LinkT, float], Awaitable[_T]], search: PrimarySearch, deadline_seconds: float
    ) -> _T:
        first_seconds = retries.LOGGED_AFTER_SECONDS

        async def call(left_seconds: float) -> _T:
            return await self._connection.call(attempt, search, left_seconds, first_seconds)

        limit_seconds = inf if self._connection.has_others else first_seconds
        return await retries.call(call, deadline_seconds, self.sleep, limit_seconds)

    async def _call_at(
        self, stub: str, method: str, request: object, link: _LinkT, timeout_seconds: float
    ) -> tuple[float, Any]:
        sent_seconds = now_seconds()
        return sent_seconds, await self._call_once(stub, method, request, link, timeout_seconds)


def _location(answer: directory_pb2.LocateResponse | directory_pb2.PlaceResponse, address: str) -> ShardAddress:
    return ShardAddress.of(answer.shard, answer.addresses, address if answer.is_own else "")


def _locations(answer: directory_pb2.ListShardsResponse, _: str) -> list[ShardAddress]:
    return [
        ShardAddress.of(
            shard.name,
            (*shard.primary_addresses, *(address for member in shard.members for address in member.addresses)),
        )
        for shard in answer.shards
        if shard.term or not shard.name
    ]
