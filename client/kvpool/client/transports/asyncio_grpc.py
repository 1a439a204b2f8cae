"""The service over gRPC's channel for asyncio."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvpool.client.lease import LeaseTimer
from kvpool.client.primary_connection import PrimaryConnection
from kvpool.client.transports.grpc import GrpcTransport
from kvpool.client.transports.server_link import ServerLink
from kvpool.client.transports.step_stream import StepStream, StreamTransport
from kvpool.client.transports.watches import WatchCall, observe_shard
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.v1 import step_pb2
from kvpool.wire import channels
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import DeadlineError


class AsyncioGrpcTransport(GrpcTransport):
    """The service at an address, for one event loop."""

    def __init__(self, address: str, deadline_seconds: float, access: ClientCredentials) -> None:
        super().__init__(address, deadline_seconds, access)
        self._observation: asyncio.Task[None] | None = None

    def _open_link(self, address: str) -> ServerLink:
        return ServerLink(address, self._access.aio_channel(address, channels.SESSION_CHANNEL_OPTIONS))

    async def _call_once(
        self, stub: str, method: str, request: object, link: ServerLink, timeout_seconds: float
    ) -> Any:  # noqa: ANN401 - any RPC
        self.check_usable()
        async with _converted(self.connection, link):
            return await getattr(getattr(link, stub), method)(request, timeout=timeout_seconds)

    async def sleep(self, seconds: float) -> None:
        """See `GrpcTransport`."""
        await asyncio.sleep(seconds)

    def open_watch(
        self, link: ServerLink, stub: str, request: object, silence_seconds: float | None = None
    ) -> "_WatchCall":
        """See `GrpcTransport`."""
        return _WatchCall(getattr(link, stub).Watch(request), silence_seconds, link, self.connection)

    def _open_stream(self, session_id: str, lease_timer: LeaseTimer) -> "_StepStream":
        return _StepStream(session_id, lease_timer, self)

    def _start_observation(self) -> None:
        self._observation = asyncio.create_task(observe_shard(self, self._access.shard))

    def _end_observation(self) -> None:
        if self._observation:
            self._observation.cancel()


class _StepStream(StepStream):
    """See `StepStream`. A task keeps the session alive."""

    def __init__(self, session_id: str, lease_timer: LeaseTimer, transport: StreamTransport) -> None:
        super().__init__(session_id, lease_timer, transport)
        self._keepalive = asyncio.create_task(self._keep_alive())

    def end(self) -> None:
        """See `StepStream`."""
        self._keepalive.cancel()
        super().end()

    def _open_call(self, link: ServerLink) -> object:
        return link.allocator.Schedule()

    async def _write(self, message: step_pb2.Step, due_seconds: float) -> None:
        async with self._converted_until(due_seconds, message) as call:
            with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended: _read() raises how
                await call.write(message)

    async def _read(self, message: step_pb2.Step, due_seconds: float) -> step_pb2.StepResult:
        async with self._converted_until(due_seconds, message) as call:
            answer = await call.read()
        if not isinstance(answer, step_pb2.StepResult):
            raise UnavailableError("ENDED", "the server ended the stream")
        return answer

    @asynccontextmanager
    async def _converted_until(
        self, due_seconds: float, message: step_pb2.Step
    ) -> "AsyncIterator[grpc.aio.StreamStreamCall[step_pb2.Step, step_pb2.StepResult]]":
        """Yields the open call for one wait, which ends in time with a KvpoolError."""
        call, link = self._call, self._link
        if call is None or link is None:  # closed meanwhile
            raise UnavailableError("CANCELLED", "the stream was cancelled")
        try:
            async with asyncio.timeout(due_seconds - time.monotonic()), _converted(self._connection, link):
                yield call
        except TimeoutError:
            text = f"no answer to step {message.sequence} in {self._deadline_seconds} s"
            raise DeadlineError("DEADLINE", text) from None

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _keep_alive(self) -> None:
        while True:
            started_seconds = time.monotonic()
            try:
                await self._renew()
            except KvpoolError as error:
                if self._renewal_failed(error):
                    return
            await asyncio.sleep(max(0.0, self._period_seconds - (time.monotonic() - started_seconds)))


class _WatchCall(WatchCall):
    """See `WatchCall`."""

    async def read(self) -> Any:  # noqa: ANN401 - see `WatchCall`
        """See `WatchCall`."""
        try:
            async with asyncio.timeout(self._silence_seconds), _converted(self._connection, self._link):
                message = await self._call.read()
        except TimeoutError:
            raise self._silence_error() from None
        if message is grpc.aio.EOF:
            raise UnavailableError("ENDED", "the server ended the watch")
        return message


@asynccontextmanager
async def _converted(connection: PrimaryConnection[ServerLink], link: ServerLink) -> AsyncIterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise connection.error_of(error, link) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnavailableError("CANCELLED", "the call was cancelled") from None  # by closing the channel
