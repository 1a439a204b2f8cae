"""The service over gRPC's channel for asyncio, and links of asyncio."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import grpc

from kvpool.client.lease import LeaseTimer
from kvpool.client.primary_connection import PrimaryConnection
from kvpool.client.server_link import ServerLink
from kvpool.client.transports.grpc import GrpcTransport, on_open_channel
from kvpool.client.transports.link_calls import AsyncioCall, open_protocol
from kvpool.client.transports.step_stream import LinkCall, ScheduleCall, StepCall, StepStream
from kvpool.client.transports.watches import WatchCall, observe_servers
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.wire.channels import ClientCredentials

_FAILURES: Final = (grpc.RpcError, asyncio.CancelledError)
"""How a call over gRPC's channel fails."""


class AsyncioGrpcTransport(GrpcTransport):
    """The service at an address, for one event loop."""

    def __init__(self, address: str, deadline_seconds: float, access: ClientCredentials) -> None:
        super().__init__(address, deadline_seconds, access)
        self._observation: asyncio.Task[None] | None = None

    def _open_link(self, address: str) -> ServerLink:
        return ServerLink(address, self.access.aio_channel(address, self.channel_options), self.access.token_reader())

    async def _call_once(
        self, method: Callable[[ServerLink], Any], request: object, link: ServerLink, timeout_seconds: float
    ) -> Any:  # noqa: ANN401 - any RPC
        self.check_usable()
        try:
            with on_open_channel(self.connection, link):
                call = method(link)(request, timeout=timeout_seconds)
            return await call
        except _FAILURES as error:
            raise _converted(error, self.connection, link) from None

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
        self._observation = asyncio.create_task(observe_servers(self))

    def _end_observation(self) -> None:
        if self._observation:
            self._observation.cancel()


class _ScheduleCall(ScheduleCall):
    """See `ScheduleCall`."""

    def send(self, step: bytes, due_seconds: float) -> None:
        """See `StepCall`."""
        del due_seconds
        with on_open_channel(self._connection, self._link):
            self._call = self._link.schedule(iter((step,)))

    async def receive(self, due_seconds: float) -> bytes:
        """See `StepCall`."""
        try:
            async with asyncio.timeout(due_seconds - time.monotonic()):
                answer = await self._call.read()
        except _FAILURES as error:
            raise _converted(error, self._connection, self._link) from None
        if not isinstance(answer, bytes):
            raise ConnectionResetError
        return answer


class _StepStream(StepStream):
    """See `StepStream`. A task keeps the session alive."""

    def __init__(self, session_id: str, lease_timer: LeaseTimer, transport: "AsyncioGrpcTransport") -> None:
        super().__init__(session_id, lease_timer, transport)
        self._keepalive = asyncio.create_task(self._keep_alive())

    def end(self) -> None:
        """See `StepStream`."""
        self._keepalive.cancel()
        super().end()

    async def _dial(self, address: str, due_seconds: float) -> LinkCall:
        call = AsyncioCall(self._refusal)
        async with asyncio.timeout(due_seconds - time.monotonic()):
            await open_protocol(address, self._transport.access, call)
        return call

    def _open_schedule(self, link: ServerLink) -> StepCall:
        return _ScheduleCall(link, self._connection)

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
            async with asyncio.timeout(self._silence_seconds):
                message = await self._call.read()
        except TimeoutError:
            raise self._silence_error() from None
        except _FAILURES as error:
            raise _converted(error, self._connection, self._link) from None
        if message is grpc.aio.EOF:
            raise UnavailableError("ENDED", "the server ended the watch")
        return message


def _converted(error: BaseException, connection: PrimaryConnection, link: ServerLink) -> BaseException:
    """Converts one of `_FAILURES` of a call. A cancelled task stays cancelled."""
    if isinstance(error, grpc.RpcError):
        return connection.error_of(error, link)
    task = asyncio.current_task()
    if task is None or task.cancelling():
        return error
    return UnavailableError("CANCELLED", "the call was cancelled")  # by closing the channel
