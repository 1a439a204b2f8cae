"""A session's stream of steps over gRPC: everything but the I/O."""

import time
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, Final, Protocol

from kvpool.client.lease import LeaseTimer, now_seconds
from kvpool.client.primary_connection import PrimaryConnection
from kvpool.client.protocol import ends_session
from kvpool.client.server_link import ServerLink
from kvpool.client.transports import messages
from kvpool.core.errors import InvalidArgumentError, KvpoolError, UnauthenticatedError, WrongStateError
from kvpool.core.steps.columns import Step, StepResult
from kvpool.v1 import allocator_pb2, step_pb2
from kvpool.wire import steps as wire_steps
from kvpool.wire.protocol_version import PROTOCOL_VERSION, check_server

_TOKEN_PAUSE_SECONDS: Final = 0.5
"""Minimum pause before a step is sent again whose token was refused."""


class StreamTransport(Protocol):
    """What a stream needs of its transport."""

    deadline_seconds: float
    connection: PrimaryConnection
    streams: "set[StepStream]"

    async def call_timed(self, method: str, request: object) -> tuple[float, Any]:
        """Makes a call that may be repeated; also returns when the call that was answered was sent."""

    async def call_at(
        self, method: str, request: object, link: ServerLink, timeout_seconds: float
    ) -> tuple[float, Any]:
        """Makes one call over a link; also returns when it was sent."""


class StepStream(ABC):
    """One session's stream of steps, reopened after it breaks, at the primary. Keeps the session alive.

    See `SessionCalls`.
    """

    def __init__(self, session_id: str, lease_timer: LeaseTimer, transport: StreamTransport) -> None:
        self._transport = transport
        self._connection = transport.connection
        self._lease_timer = lease_timer
        self._session_id = session_id
        self._deadline_seconds = transport.deadline_seconds
        self._period_seconds = min(lease_timer.lease_seconds / 3, self._deadline_seconds / 4)
        self._link: ServerLink | None = None
        """The link of the call."""
        self._call: Any = None
        """The open call, of the transport's own type; None before the first step, and after a failure."""
        self._is_version_checked = False
        """Whether the server stated its version on the open call."""
        self._begun: tuple[step_pb2.Step, float] | None = None
        """The step of `begin_exchange` and when it was sent, until `exchange` waits for its result."""
        self._ended_by: KvpoolError | None = None
        """Why no step can be sent any more: the error of every later one."""

    async def exchange(self, step: Step) -> StepResult:
        """Sends a step and waits for its result, over as many streams as this takes within the deadline."""
        begun = self._begun
        if begun and begun[0].sequence == step.sequence:
            message = begun[0]
        else:
            message = wire_steps.step_to_proto(step, self._session_id)
        attempt = partial(self._exchange_once, message)
        return wire_steps.result_from_proto(await self._connection.call(attempt, self._deadline_seconds, self._sleep))

    async def begin_exchange(self, step: Step) -> None:
        """Sends a step without waiting. `exchange` must follow: it raises the errors, and repeats a step."""
        if self._ended_by:
            return
        try:
            message = wire_steps.step_to_proto(step, self._session_id)
        except InvalidArgumentError:
            return
        try:
            sent_seconds = now_seconds()
            link = await self._connection.link()
            if self._call is None or self._link is not link:
                self._start_call(message, link)
            await self._write_ahead(message, time.monotonic() + self._period_seconds)
            self._begun = message, sent_seconds
        except KvpoolError:
            self.end_call()
        except BaseException:
            self.end_call()  # whether an answer will come is unknown
            raise

    def end_call(self) -> None:
        """Cancels the call: its next answer could be mistaken for that of a later step."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def mark_executed(self, executed_sequence: int) -> None:
        """See `SessionCalls`."""
        request = allocator_pb2.MarkExecutedRequest(session_id=self._session_id, executed_sequence=executed_sequence)
        await self._call_and_renew("MarkExecuted", request)

    async def set_weights_version(self, weights_version: str) -> None:
        """See `SessionCalls`."""
        await self._call_and_renew(
            "SetWeightsVersion", messages.set_weights_version_request(self._session_id, weights_version)
        )

    async def close(self) -> None:
        """See `SessionCalls`."""
        self._connection.check()
        self.end()
        await self._transport.call_timed("CloseSession", allocator_pb2.CloseSessionRequest(session_id=self._session_id))

    def forget(self) -> None:
        """See `SessionCalls`."""
        self._transport.streams.discard(self)
        self.end()

    def end(self) -> None:
        """Ends the stream, and stops keeping the session alive."""
        self._ended_by = WrongStateError("CLOSED", "the session was closed in this process, or its client")
        self.end_call()

    async def _exchange_once(
        self, message: step_pb2.Step, link: ServerLink, timeout_seconds: float
    ) -> step_pb2.StepResult:
        """Makes one attempt, on the open call if there is one. A step that was begun on it is only waited for."""
        if self._ended_by:
            raise self._ended_by
        due_seconds = time.monotonic() + timeout_seconds
        try:
            begun, self._begun = self._begun, None
            sent_seconds = now_seconds()
            is_open = self._call is not None and self._link is link
            if is_open and begun and begun[0] is message:
                sent_seconds = begun[1]
            else:
                if not is_open:
                    self._start_call(message, link)
                await self._write(message, due_seconds)
            answer = await self._read(message, due_seconds)
            if not self._is_version_checked:
                check_server(answer.protocol_version)
                self._is_version_checked = True
        except BaseException as error:
            self.end_call()
            if isinstance(error, UnauthenticatedError):  # the token may be replaced, and was accepted before
                error.retry_seconds = _TOKEN_PAUSE_SECONDS
            raise
        self._lease_timer.renew(sent_seconds)
        if answer.sequence != message.sequence:
            self.end_call()
        return answer

    def _start_call(self, message: step_pb2.Step, link: ServerLink) -> None:
        """Opens a call for a step; ends one over another link, whose server is not the primary any more.

        The first step and the first result of a call carry the protocol version.
        """
        self.end_call()
        message.protocol_version = PROTOCOL_VERSION
        self._is_version_checked = False
        self._link = link
        self._call = self._open_call(link)

    @abstractmethod
    def _open_call(self, link: ServerLink) -> object:
        """Opens a call of Schedule. A connection that cannot be made is reported by `_read`."""

    @abstractmethod
    async def _write(self, message: step_pb2.Step, due_seconds: float) -> None:
        """Sends a step on the open call, until a time of the monotonic clock. A broken call is reported by `_read`."""

    async def _write_ahead(self, message: step_pb2.Step, due_seconds: float) -> None:
        """Sends a step that `exchange` waits for later."""
        await self._write(message, due_seconds)

    @abstractmethod
    async def _read(self, message: step_pb2.Step, due_seconds: float) -> step_pb2.StepResult:
        """Waits for the answer of a step, until a time of the monotonic clock."""

    @abstractmethod
    async def _sleep(self, seconds: float) -> None:
        """Waits between two attempts."""

    async def _call_and_renew(self, method: str, request: object) -> None:
        """Makes a call of the session, which extends its lease."""
        sent_seconds, _ = await self._transport.call_timed(method, request)
        self._lease_timer.renew(sent_seconds)

    async def _renew(self) -> None:
        """Extends the lease once. Raises KvpoolError."""
        request = allocator_pb2.KeepAliveRequest(session_id=self._session_id)
        attempt = partial(self._transport.call_at, "KeepAlive", request)
        try_seconds = self._period_seconds / (2 if self._connection.has_others else 1)
        sent_seconds, _ = await self._connection.call(attempt, self._period_seconds, None, try_seconds=try_seconds)
        self._lease_timer.renew(sent_seconds)

    def _renewal_failed(self, error: KvpoolError) -> bool:
        """Handles an error of KeepAlive. Returns whether the session has ended; the next step then raises the error."""
        if ends_session(error):
            self._lease_timer.end()
            self._ended_by = error
        return self._ended_by is not None
