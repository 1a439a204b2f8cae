"""The service over gRPC's channel for asyncio."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvpool.client.connection_state import ConnectionState
from kvpool.client.lease import now_seconds
from kvpool.client.transports.grpc import GrpcTransport, StepStream
from kvpool.client.transports.resumable_watch import ResumableWatch
from kvpool.client.transports.transport import OpenedSession
from kvpool.core.errors import UnavailableError
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, event_pb2, event_pb2_grpc, step_pb2
from kvpool.wire import channels
from kvpool.wire.channels import Access
from kvpool.wire.errors import DeadlineError


class AsyncioGrpcTransport(GrpcTransport):
    """The service at an address, for one event loop."""

    def __init__(self, address: str, deadline_seconds: float, access: Access) -> None:
        super().__init__(address, deadline_seconds, access)
        self._channel = access.aio_channel(address, channels.SESSION_CHANNEL_OPTIONS)
        self._stub: allocator_pb2_grpc.AllocatorServiceAsyncStub = allocator_pb2_grpc.AllocatorServiceStub(
            self._channel
        )
        self._events: event_pb2_grpc.EventServiceAsyncStub = event_pb2_grpc.EventServiceStub(self._channel)

    async def _call_once(self, method: Callable[..., Any], request: object, timeout_seconds: float) -> Any:  # noqa: ANN401 - any RPC
        self.check_usable()
        async with _converted(self._connection):
            return await method(request, timeout=timeout_seconds)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _open_stream(self, opened: OpenedSession) -> "_StepStream":
        return _StepStream(self._stub, opened, self._deadline_seconds, self._connection)

    def _start_watch(self, state: ResumableWatch) -> "_WatchCall":
        return _WatchCall(self._events.Watch(state.request()), state, self._connection)

    async def _close_channel(self) -> None:
        await self._channel.close()


class _StepStream(StepStream):
    """See `StepStream`. A task keeps the session alive."""

    def __init__(
        self,
        stub: "allocator_pb2_grpc.AllocatorServiceAsyncStub",
        opened: OpenedSession,
        deadline_seconds: float,
        connection: ConnectionState,
    ) -> None:
        super().__init__(opened, deadline_seconds, connection)
        self._stub = stub
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

    async def _exchange_once(self, message: step_pb2.Step, timeout_seconds: float) -> step_pb2.StepResult:
        try:
            async with asyncio.timeout(timeout_seconds):
                return await super()._exchange_once(message, timeout_seconds)
        except TimeoutError:
            text = f"no answer to step {message.sequence} in {self._deadline_seconds} s"
            raise DeadlineError("DEADLINE", text) from None

    async def _write(self, message: step_pb2.Step) -> None:
        async with _converted(self._connection):
            if self._call is None:
                self._call = self._stub.Schedule()
            with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended: _read() raises how
                await self._call.write(message)

    async def _write_ahead(self, message: step_pb2.Step) -> None:
        try:
            async with asyncio.timeout(self._period_seconds):
                await super()._write_ahead(message)
        except TimeoutError:
            text = f"step {message.sequence} could not be sent in {self._period_seconds} s"
            raise UnavailableError("BROKEN", text) from None

    async def _read(self, message: step_pb2.Step) -> step_pb2.StepResult:
        del message
        if self._call is None:  # closed meanwhile
            raise UnavailableError("CANCELLED", "the stream was cancelled")
        async with _converted(self._connection):
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
        request = allocator_pb2.KeepAliveRequest(session_id=self._session_id)
        while True:
            started_seconds, sent_seconds = time.monotonic(), now_seconds()
            try:
                await self._stub.KeepAlive(request, timeout=self._period_seconds)
            except grpc.RpcError as error:
                if self._note_failed_renewal(self._connection.error_of(error)):
                    return
            except grpc.aio.UsageError:  # the channel was closed
                return
            else:
                self.lease_timer.renew(sent_seconds)
            await asyncio.sleep(max(0.0, self._period_seconds - (time.monotonic() - started_seconds)))


class _WatchCall:
    """See `WatchCall`."""

    def __init__(
        self,
        call: "grpc.aio.UnaryStreamCall[event_pb2.WatchRequest, event_pb2.WatchResponse]",
        state: ResumableWatch,
        connection: ConnectionState,
    ) -> None:
        self._call = call
        self._state = state
        self._connection = connection

    async def read(self) -> event_pb2.WatchResponse:
        """See `WatchCall`."""
        try:
            async with asyncio.timeout(self._state.silence_seconds), _converted(self._connection):
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
async def _converted(connection: ConnectionState) -> AsyncIterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise connection.error_of(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnavailableError("CANCELLED", "the call was cancelled") from None  # by closing the channel
