"""The service over gRPC: everything but the I/O, which `blocking_grpc` and `asyncio_grpc` add."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine
from functools import partial
from typing import Any, Final, Protocol

from kvpool.client import retries
from kvpool.client.connection_state import ConnectionState
from kvpool.client.lease import now_seconds
from kvpool.client.protocol import ends_session
from kvpool.client.transports import messages
from kvpool.client.transports.resumable_watch import ResumableWatch
from kvpool.client.transports.transport import EventBatch, OpenedSession, SessionOptions, WatchOptions
from kvpool.core.errors import (
    InvalidArgumentError,
    KvpoolError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Step, StepResult
from kvpool.core.views.pool_info import PoolInfo
from kvpool.v1 import allocator_pb2, event_pb2, step_pb2
from kvpool.wire import steps as wire_steps
from kvpool.wire.channels import Access
from kvpool.wire.errors import ServerError
from kvpool.wire.protocol_version import PROTOCOL_VERSION, check_server

_WAIT_PAUSE_SECONDS: Final = 0.2
"""Pause before an unreachable server is called again, while the client waits for a pool."""
_TOKEN_PAUSE_SECONDS: Final = 0.5
"""Minimum pause before a step is sent again whose token was refused."""


class WatchCall(Protocol):
    """A call of Watch."""

    async def read(self) -> event_pb2.WatchResponse:
        """Waits for the next message, at most `ResumableWatch.silence_seconds`."""

    def cancel(self) -> object:
        """Ends the call."""


class GrpcTransport(ABC):
    """The service at an address. See `Transport`."""

    def __init__(self, address: str, deadline_seconds: float, access: Access) -> None:
        self._deadline_seconds = deadline_seconds
        self._connection = ConnectionState(address, access)
        self._streams: dict[str, StepStream] = {}
        self._stub: Any
        """AllocatorService's; its methods return awaitables in one subclass and messages in the other."""

    def check_usable(self) -> None:
        """See `Transport`."""
        self._connection.check()

    async def create_pool(self, config: PoolConfig) -> PoolInfo:
        """See `Transport`."""
        return messages.read_pool(await self._call(self._stub.CreatePool, messages.create_pool_request(config)))

    async def get_pool(self, name: str) -> PoolInfo:
        """See `Transport`."""
        return messages.read_pool(await self._call(self._stub.GetPool, allocator_pb2.GetPoolRequest(pool_name=name)))

    async def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """See `Transport`."""
        due_seconds = time.monotonic() + timeout_seconds
        left_seconds = timeout_seconds
        while True:
            request = allocator_pb2.WaitUntilReadyRequest(pool_name=name, timeout_seconds=left_seconds)
            try:
                answer = await self._call_once(
                    self._stub.WaitUntilReady, request, left_seconds + self._deadline_seconds
                )
                return messages.check_ready(messages.read_pool(answer), timeout_seconds)
            except UnavailableError as error:
                left_seconds = due_seconds - time.monotonic()
                if left_seconds <= 0:
                    raise
                pause_seconds = min(error.retry_seconds or _WAIT_PAUSE_SECONDS, left_seconds)
            await self._sleep(pause_seconds)
            left_seconds = max(due_seconds - time.monotonic(), 0.0)

    async def open_session(self, options: SessionOptions) -> OpenedSession:
        """See `Transport`. From here on the transport keeps the session alive."""
        request = messages.open_session_request(options)
        sent_seconds, response = await self._call_timed(self._stub.OpenSession, request)
        try:
            check_server(response.protocol_version)
        except ServerError:
            session_id = response.session.session_id
            with contextlib.suppress(KvpoolError):  # the session ends with its lease
                await self._call(self._stub.CloseSession, allocator_pb2.CloseSessionRequest(session_id=session_id))
            raise
        return self._drive(messages.read_session(response, sent_seconds))

    async def resume_session(self, session_id: str, sequence: int) -> OpenedSession:
        """See `Transport`. From here on the transport keeps the session alive."""
        request = messages.resume_session_request(session_id, sequence)
        sent_seconds, response = await self._call_timed(self._stub.ResumeSession, request)
        check_server(response.protocol_version)
        return self._drive(messages.read_session(response, sent_seconds))

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
        sent_seconds, _ = await self._call_timed(self._stub.MarkExecuted, request)
        self._stream(session_id).lease_timer.renew(sent_seconds)

    async def set_weights_version(self, session_id: str, weights_version: str) -> None:
        """See `Transport`."""
        request = messages.set_weights_version_request(session_id, weights_version)
        sent_seconds, _ = await self._call_timed(self._stub.SetWeightsVersion, request)
        self._stream(session_id).lease_timer.renew(sent_seconds)

    async def close_session(self, session_id: str) -> None:
        """See `Transport`."""
        self.check_usable()
        if session_id in self._streams:  # else it has ended, and the server answers how
            self._streams[session_id].close()
        await self._call(self._stub.CloseSession, allocator_pb2.CloseSessionRequest(session_id=session_id))

    def forget(self, session_id: str) -> None:
        """See `Transport`."""
        stream = self._streams.pop(session_id, None)
        if stream:
            stream.close()

    async def watch(self, options: WatchOptions) -> AsyncGenerator[EventBatch]:
        """See `Transport`."""
        self.check_usable()
        state = ResumableWatch(options)
        call = self._start_watch(state)
        try:
            first = await call.read()
        except BaseException as error:
            call.cancel()
            if isinstance(error, KvpoolError):
                self.check_usable()  # closed meanwhile
            raise
        return self._batches(state, call, first)

    async def _batches(
        self, state: ResumableWatch, call: WatchCall, first: event_pb2.WatchResponse
    ) -> AsyncGenerator[EventBatch]:
        message: event_pb2.WatchResponse | None = first
        while True:
            try:
                try:
                    while True:
                        batch = state.read(message or await call.read())
                        message = None
                        if batch:
                            yield batch
                            self.check_usable()
                finally:
                    call.cancel()
            except KvpoolError as error:
                self.check_usable()
                pause_seconds = state.pause_seconds(error)
            await self._sleep(pause_seconds)
            self.check_usable()
            call = self._start_watch(state)

    async def close(self) -> None:
        """See `Transport`. In a forked process it does nothing: the connection is that of the other process."""
        if not self._connection.end():
            return
        for stream in list(self._streams.values()):  # a call in another thread may forget one
            stream.close()
        self._streams.clear()
        await self._close_channel()

    @abstractmethod
    async def _call_once(self, method: Any, request: Any, timeout_seconds: float) -> Any:  # noqa: ANN401 - any RPC
        """Makes a unary call. Calls `check_usable` first."""

    @abstractmethod
    async def _sleep(self, seconds: float) -> None:
        """Waits."""

    @abstractmethod
    def _open_stream(self, opened: OpenedSession) -> "StepStream":
        """Makes a session's stream, and starts to keep the session alive."""

    @abstractmethod
    def _start_watch(self, state: ResumableWatch) -> WatchCall:
        """Starts the next call of a watch."""

    @abstractmethod
    async def _close_channel(self) -> None:
        """Ends the connection."""

    def _drive(self, opened: OpenedSession) -> OpenedSession:
        self._streams[opened.session_id] = self._open_stream(opened)
        return opened

    def _stream(self, session_id: str) -> "StepStream":
        self.check_usable()
        stream = self._streams.get(session_id)
        if stream is None:
            raise _closed_error()
        return stream

    async def _call(self, method: Any, request: Any) -> Any:  # noqa: ANN401 - any RPC
        return (await self._call_timed(method, request))[1]

    async def _call_timed(self, method: Any, request: Any) -> tuple[float, Any]:  # noqa: ANN401 - any RPC
        """Makes a call that may be repeated; also returns when the call that was answered was sent."""

        async def attempt(left_seconds: float) -> tuple[float, Any]:
            sent_seconds = now_seconds()
            return sent_seconds, await self._call_once(method, request, left_seconds)

        return await retries.call(attempt, self._deadline_seconds, self._sleep, retries.LOGGED_AFTER_SECONDS)


class StepStream(ABC):
    """One session's stream of steps, reopened after it breaks. Keeps the session alive.

    Attributes:
        lease_timer: The time for which the session's lease is certain to last.
    """

    def __init__(self, opened: OpenedSession, deadline_seconds: float, connection: ConnectionState) -> None:
        self._connection = connection
        self.lease_timer = opened.lease_timer
        self._session_id = opened.session_id
        self._deadline_seconds = deadline_seconds
        self._period_seconds = min(opened.lease_seconds / 3, deadline_seconds / 4)
        self._ahead: tuple[step_pb2.Step, float] | None = None
        """The step that was sent ahead and when, until `exchange` waits for its result."""
        self._is_closed = False
        self._is_version_checked = False
        """Whether the server stated its version on the open call."""
        self._ended_by: KvpoolError | None = None

    async def send_ahead(self, step: Step) -> None:
        """Sends a step without waiting. `exchange` must follow, and repeats the step if it was not sent."""
        if self._is_closed or self._ended_by:
            return
        try:
            message = wire_steps.step_to_proto(step, self._session_id)
        except InvalidArgumentError:
            return
        try:
            sent_seconds = now_seconds()
            self._state_version(message)
            await self._write_ahead(message)
            self._ahead = message, sent_seconds
        except KvpoolError:
            self.end_call()  # `exchange` sends the step on another stream
        except BaseException:
            self.end_call()  # whether an answer will come is unknown
            raise

    async def exchange(self, step: Step) -> StepResult:
        """Sends a step and waits for its result, over as many streams as this takes within the deadline."""
        ahead = self._ahead
        if ahead and ahead[0].sequence == step.sequence:
            message = ahead[0]
        else:
            message = wire_steps.step_to_proto(step, self._session_id)
        exchange_once = partial(self._exchange_once, message)
        return wire_steps.result_from_proto(await retries.call(exchange_once, self._deadline_seconds, self._sleep))

    def close(self) -> None:
        """Ends the stream, and stops keeping the session alive."""
        self._is_closed = True
        self.end_call()

    def _state_version(self, message: step_pb2.Step) -> None:
        """Adds the version to the first step of a call. The first result carries the server's."""
        if not self._has_call:
            message.protocol_version = PROTOCOL_VERSION
            self._is_version_checked = False

    @abstractmethod
    def end_call(self) -> None:
        """Cancels the call: its next answer could be mistaken for that of a later step."""

    @abstractmethod
    async def _write(self, message: step_pb2.Step) -> None:
        """Sends a step, on a new call if there is none. A broken call is reported by `_read`."""

    async def _write_ahead(self, message: step_pb2.Step) -> None:
        """Sends a step that `exchange` waits for later."""
        await self._write(message)

    @abstractmethod
    async def _read(self, message: step_pb2.Step) -> step_pb2.StepResult:
        """Waits for the answer of a step."""

    @abstractmethod
    async def _sleep(self, seconds: float) -> None:
        """Waits between two attempts."""

    @property
    @abstractmethod
    def _has_call(self) -> bool:
        """Whether a call is open."""

    async def _exchange_once(self, message: step_pb2.Step, timeout_seconds: float) -> step_pb2.StepResult:
        """Makes one attempt. A transport limits its time."""
        del timeout_seconds
        if self._is_closed:
            raise _closed_error()
        if self._ended_by:
            raise self._ended_by
        try:
            ahead, self._ahead = self._ahead, None
            sent_seconds = now_seconds()
            if ahead and ahead[0] is message and self._has_call:
                sent_seconds = ahead[1]
            else:
                self._state_version(message)
                await self._write(message)
            answer = await self._read(message)
            if not self._is_version_checked:
                check_server(answer.protocol_version)
                self._is_version_checked = True
        except BaseException as error:
            self.end_call()
            if isinstance(error, UnauthenticatedError):  # the token may be replaced, and was accepted before
                error.retry_seconds = _TOKEN_PAUSE_SECONDS
            raise
        self.lease_timer.renew(sent_seconds)
        if answer.sequence != message.sequence:
            self.end_call()
        return answer

    def _note_failed_renewal(self, error: KvpoolError) -> bool:
        """Returns whether the session has ended, after KeepAlive failed. The next step then raises the error."""
        if ends_session(error):
            self.lease_timer.end()
            self._ended_by = error
        return self._ended_by is not None


def _closed_error() -> WrongStateError:
    return WrongStateError("CLOSED", "the session was closed in this process, or its client")
