"""The service over gRPC's channel for asyncio."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvpool.client.primary_connection import PrimaryConnection
from kvpool.client.transports.grpc import GrpcTransport
from kvpool.client.transports.resumable_watch import ResumableWatch
from kvpool.client.transports.step_stream import StepStream
from kvpool.client.transports.transport import OpenedSession
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.v1 import (
    allocator_pb2_grpc,
    directory_pb2,
    directory_pb2_grpc,
    event_pb2,
    event_pb2_grpc,
    step_pb2,
)
from kvpool.wire import channels
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import DeadlineError


class _Link:
    """A connection to one server."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.allocator: allocator_pb2_grpc.AllocatorServiceAsyncStub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        self.events: event_pb2_grpc.EventServiceAsyncStub = event_pb2_grpc.EventServiceStub(channel)
        self.directory: directory_pb2_grpc.DirectoryServiceAsyncStub = directory_pb2_grpc.DirectoryServiceStub(channel)
        self._channel = channel

    async def close(self) -> None:
        """Ends the connection and cancels its calls."""
        await self._channel.close()


class AsyncioGrpcTransport(GrpcTransport[_Link]):
    """The service at an address, for one event loop."""

    def __init__(self, address: str, deadline_seconds: float, access: ClientCredentials) -> None:
        super().__init__(address, deadline_seconds, access)
        self._observation: asyncio.Task[None] | None = None

    def _open_link(self, address: str) -> _Link:
        return _Link(address, self._access.aio_channel(address, channels.SESSION_CHANNEL_OPTIONS))

    async def _call_once(self, stub: str, method: str, request: object, link: _Link, timeout_seconds: float) -> Any:  # noqa: ANN401 - any RPC
        self.check_usable()
        async with _converted(self._connection, link):
            return await getattr(getattr(link, stub), method)(request, timeout=timeout_seconds)

    async def sleep(self, seconds: float) -> None:
        """See `GrpcTransport`."""
        await asyncio.sleep(seconds)

    def _open_stream(self, opened: OpenedSession) -> "_StepStream":
        return _StepStream(opened, self.deadline_seconds, self._connection, self.renew)

    def _start_watch(self, link: _Link, state: ResumableWatch) -> "_WatchCall":
        return _WatchCall(link.events.Watch(state.request()), state, link, self._connection)

    def _start_observation(self) -> None:
        self._observation = asyncio.create_task(self._observe_others(asyncio.sleep))

    def _end_observation(self) -> None:
        if self._observation:
            self._observation.cancel()

    def _watch_shard(self, link: _Link) -> Callable[[], Awaitable[directory_pb2.Shard]]:
        call = link.directory.Watch(directory_pb2.DirectoryServiceWatchRequest(shard=self._access.shard))

        async def read() -> directory_pb2.Shard:
            async with _converted(self._connection, link):
                message = await call.read()
            if not isinstance(message, directory_pb2.DirectoryServiceWatchResponse):
                raise UnavailableError("ENDED", "the server ended the watch")
            return message.shard

        return read


class _StepStream(StepStream[_Link]):
    """See `StepStream`. A task keeps the session alive."""

    def __init__(
        self,
        opened: OpenedSession,
        deadline_seconds: float,
        connection: PrimaryConnection[_Link],
        renew: Callable[[str, float], Awaitable[float]],
    ) -> None:
        super().__init__(opened, deadline_seconds, connection, renew)
        self._call: grpc.aio.StreamStreamCall[step_pb2.Step, step_pb2.StepResult] | None = None
        self._keepalive = asyncio.create_task(self._keep_alive())

    def close(self) -> None:
        """See `StepStream`."""
        self._keepalive.cancel()
        super().close()

    def end_call(self) -> None:
        """See `StepStream`."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def _exchange_once(self, message: step_pb2.Step, link: _Link, timeout_seconds: float) -> step_pb2.StepResult:
        try:
            async with asyncio.timeout(timeout_seconds):
                return await super()._exchange_once(message, link, timeout_seconds)
        except TimeoutError:
            text = f"no answer to step {message.sequence} in {self._deadline_seconds} s"
            raise DeadlineError("DEADLINE", text) from None

    async def _write(self, message: step_pb2.Step, link: _Link) -> None:
        async with _converted(self._connection, link):
            if self._call is None:
                self._call = link.allocator.Schedule()
            with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended: _read() raises how
                await self._call.write(message)

    async def _write_ahead(self, message: step_pb2.Step, link: _Link) -> None:
        try:
            async with asyncio.timeout(self._period_seconds):
                await super()._write_ahead(message, link)
        except TimeoutError:
            text = f"step {message.sequence} could not be sent in {self._period_seconds} s"
            raise UnavailableError("BROKEN", text) from None

    async def _read(self, message: step_pb2.Step) -> step_pb2.StepResult:
        del message
        if self._call is None or self._link is None:  # closed meanwhile
            raise UnavailableError("CANCELLED", "the stream was cancelled")
        async with _converted(self._connection, self._link):
            answer = await self._call.read()
        if not isinstance(answer, step_pb2.StepResult):
            raise UnavailableError("ENDED", "the server ended the stream")
        return answer

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @property
    def _has_call(self) -> bool:
        return self._call is not None

    async def _keep_alive(self) -> None:
        while True:
            started_seconds = time.monotonic()
            try:
                await self._renew()
            except KvpoolError as error:
                if self._note_failed_renewal(error):
                    return
            await asyncio.sleep(max(0.0, self._period_seconds - (time.monotonic() - started_seconds)))


class _WatchCall:
    """See `WatchCall`."""

    def __init__(
        self,
        call: "grpc.aio.UnaryStreamCall[event_pb2.WatchRequest, event_pb2.WatchResponse]",
        state: ResumableWatch,
        link: _Link,
        connection: PrimaryConnection[_Link],
    ) -> None:
        self._call = call
        self._state = state
        self._link = link
        self._connection = connection

    async def read(self) -> event_pb2.WatchResponse:
        """See `WatchCall`."""
        try:
            async with asyncio.timeout(self._state.silence_seconds), _converted(self._connection, self._link):
                message = await self._call.read()
        except TimeoutError:
            raise self._state.silence_error() from None
        if not isinstance(message, event_pb2.WatchResponse):
            raise UnavailableError("ENDED", "the server ended the watch")
        return message

    def cancel(self) -> None:
        """See `WatchCall`."""
        self._call.cancel()


@asynccontextmanager
async def _converted(connection: PrimaryConnection[_Link], link: _Link) -> AsyncIterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise connection.error_of(error, link) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnavailableError("CANCELLED", "the call was cancelled") from None  # by closing the channel
