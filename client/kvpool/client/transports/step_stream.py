"""A session's steps over a link, or over gRPC where no link can be made: everything but the I/O.

1. A link carries steps until it breaks. It is opened with the session, so that the server knows at once when this
   process has ended.
2. The listener of links is beside the server's gRPC address. A client that does not reach it asks the server again by
   KeepAlive: no answer means that the server is away; another listener, that it was started again. With the same answer
   something stands between, or the listener is busy: each step is a call of Schedule for a time. Then a link is tried
   again.
3. A token goes over a link only if it cannot be read there. What listens at the address of steps may be another program
   than what forwards gRPC's address.
"""

import logging
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from google.protobuf.message import DecodeError

from kvpool.client.lease import LeaseTimer, now_seconds
from kvpool.client.primary_connection import REPLACED, PrimaryConnection
from kvpool.client.protocol import ends_session
from kvpool.client.server_link import Cancellable, ServerLink
from kvpool.client.transports import messages
from kvpool.core.errors import (
    InvalidArgumentError,
    KvpoolError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from kvpool.core.steps.columns import Step, StepResult
from kvpool.v1 import allocator_pb2, step_pb2
from kvpool.v1.link_pb2 import LinkHello, StepsHello
from kvpool.wire import link as wire_link
from kvpool.wire import steps as wire_steps
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import DeadlineError, ServerError
from kvpool.wire.frames import encode_frame
from kvpool.wire.protocol_version import check_server

FIRST_GRPC_SECONDS: Final = 4.0
"""Time for which steps go over gRPC after no link could be made. It doubles each time, up to `GRPC_SECONDS`."""
GRPC_SECONDS: Final = 60.0
CONNECT_SECONDS: Final = 5.0
"""Time limit of making a link; at most a third of what is left, as other ways need the rest."""
_DIAL_AGAIN_SECONDS: Final = 0.5
"""Time limit of the connection after a failure: where packets are dropped, a step waits for it every minute."""
SILENCE_SECONDS: Final = 10.0
"""Time without an answer after which a step is sent again on another link: nothing but an answer shows that what is
between client and server still works."""
_TOKEN_PAUSE_SECONDS: Final = 0.5
"""Minimum pause before a step is sent again whose token was refused."""

_log = logging.getLogger("kvpool.client")


class LinkNotReachedError(UnavailableError):
    """No link can be made at an address: no server listens there, or another one, or another program."""


class StepCall(Cancellable, Protocol):
    """What carries steps: a link, or a call of Schedule for one step."""

    is_link: bool

    def send(self, step: bytes, due_seconds: float) -> None:
        """Sends a step, until a time of the monotonic clock. What has broken is reported by `receive`."""

    def has_answer(self) -> bool:
        """Whether `receive` would not wait."""

    async def receive(self, due_seconds: float) -> bytes:
        """Waits for the result of a step.

        Raises:
            KvpoolError: The server has refused the step.
            TimeoutError: No result came until the time of the monotonic clock.
            OSError: The connection has ended.
        """


class LinkCall(StepCall, Protocol):
    """A link."""

    def write(self, data: bytes, due_seconds: float) -> None:
        """Sends bytes, until a time of the monotonic clock. What has broken is reported by `receive`."""


class ScheduleCall(ABC):
    """A call of Schedule for one step; see `StepCall`."""

    is_link = False

    def __init__(self, link: ServerLink, connection: PrimaryConnection) -> None:
        self._link = link
        self._connection = connection
        self._call: Any = None

    @abstractmethod
    def send(self, step: bytes, due_seconds: float) -> None:
        """See `StepCall`."""

    def has_answer(self) -> bool:
        """See `StepCall`. gRPC does not tell, so the session waits."""
        return True

    @abstractmethod
    async def receive(self, due_seconds: float) -> bytes:
        """See `StepCall`."""

    def cancel(self) -> None:
        """See `StepCall`."""
        if self._call is not None:
            self._call.cancel()


class StreamTransport(Protocol):
    """What a stream needs of its transport."""

    access: ClientCredentials
    deadline_seconds: float
    connection: PrimaryConnection
    streams: "set[StepStream]"

    async def call_timed(self, method: str, request: object) -> tuple[float, Any]:
        """Makes a call that may be repeated; also returns when the call that was answered was sent."""

    async def call_at(
        self, method: str, request: object, link: ServerLink, timeout_seconds: float
    ) -> tuple[float, Any]:
        """Makes one call over a link; also returns when it was sent."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that was sent, and for which `exchange` waits later."""

    sequence: int
    encoded: bytes
    sent_seconds: float


class StepStream(ABC):
    """The steps of one session, over links that are made again when they break, at the primary. Keeps it alive.

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
        """The connection of the call."""
        self._call: StepCall | None = None
        """The open call; None before the first step, and after a failure."""
        self._begun: _Begun | None = None
        self._ended_by: KvpoolError | None = None
        """Why no step can be sent any more: the error of every later one."""

    async def prepare(self) -> None:
        """See `SessionCalls`."""
        try:
            link = await self._connection.link()
            await self._open(link, time.monotonic() + self._deadline_seconds)
        except (KvpoolError, OSError):
            self.end_call()

    async def exchange(self, step: Step) -> StepResult:
        """Sends a step and waits for its result, over as many links as this takes within the deadline."""
        begun = self._begun
        if begun and begun.sequence == step.sequence:
            encoded = begun.encoded
        else:
            encoded = wire_steps.step_to_proto(step, self._session_id).SerializeToString()
        attempt = partial(self._exchange_once, step.sequence, encoded)
        return await self._connection.call(attempt, self._deadline_seconds, self._sleep, try_seconds=SILENCE_SECONDS)

    async def begin_exchange(self, step: Step) -> None:
        """Sends a step without waiting. `exchange` must follow: it raises the errors, and repeats a step."""
        if self._ended_by:
            return
        try:
            encoded = wire_steps.step_to_proto(step, self._session_id).SerializeToString()
        except InvalidArgumentError:
            return
        try:
            sent_seconds = now_seconds()
            link, due_seconds = await self._connection.link(), time.monotonic() + self._period_seconds
            call = self._call
            if call is None or self._link is not link:
                call = await self._open(link, due_seconds)
            call.send(encoded, due_seconds)
            self._begun = _Begun(step.sequence, encoded, sent_seconds)
        except (KvpoolError, OSError):
            self.end_call()
        except BaseException:
            self.end_call()  # whether an answer will come is unknown
            raise

    def is_answered(self) -> bool:
        """See `SessionCalls`."""
        return self._begun is None or self._call is None or self._call.has_answer()

    def end_call(self) -> None:
        """Cancels the call: its next answer could be mistaken for that of a later step."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
            if self._link:
                self._link.step_calls.discard(call)

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
        """Ends the call, and stops keeping the session alive."""
        self._ended_by = WrongStateError("CLOSED", "the session was closed in this process, or its client")
        self.end_call()

    async def _exchange_once(
        self, sequence: int, encoded: bytes, link: ServerLink, timeout_seconds: float
    ) -> StepResult:
        """Makes one attempt, on the open call if there is one. A step that was begun on it is only waited for."""
        if self._ended_by:
            raise self._ended_by
        due_seconds = time.monotonic() + timeout_seconds
        try:
            begun, self._begun = self._begun, None
            call = self._call
            if call is not None and self._link is link and begun and begun.encoded is encoded:
                sent_seconds = begun.sent_seconds
            else:
                if call is None or self._link is not link:
                    call = await self._open(link, due_seconds)
                sent_seconds = now_seconds()
                call.send(encoded, due_seconds)
            answer = step_pb2.StepResult.FromString(await call.receive(due_seconds))
            if not call.is_link:
                check_server(answer.protocol_version)
        except BaseException as error:
            self.end_call()
            failure = self._failure(error, link, sequence)
            if failure is error:
                raise
            raise failure from None
        self._lease_timer.renew(sent_seconds)
        if answer.sequence != sequence or not call.is_link:
            self.end_call()
        return wire_steps.result_from_proto(answer)

    def _failure(self, error: BaseException, link: ServerLink, sequence: int) -> BaseException:
        """The error of an attempt, given what has ended it."""
        if isinstance(error, UnauthenticatedError):  # the token may be replaced, and was accepted before
            error.retry_seconds = _TOKEN_PAUSE_SECONDS
        if isinstance(error, TimeoutError) and error.errno is None:  # with a number, it is a connection that broke
            return DeadlineError("DEADLINE", f"no answer to step {sequence} in {self._deadline_seconds} s")
        if isinstance(error, DecodeError):
            return ServerError("MALFORMED", f"{link.address}: the result of a step cannot be parsed")
        if not isinstance(error, OSError):
            return error
        if self._ended_by:
            return self._ended_by
        if self._connection.is_replaced(link):
            return UnavailableError(*REPLACED)
        return UnavailableError("ENDED", f"{link.address}: the server ended the link")

    async def _open(self, link: ServerLink, due_seconds: float) -> StepCall:
        """Makes a link to a server, or a call of Schedule where none can be made; see rule 2."""
        self.end_call()
        call = await self._open_link(link, due_seconds) or self._open_schedule(link)
        self._link, self._call = link, call
        if self._ended_by or self._connection.is_replaced(link):  # another thread has done so meanwhile
            self.end_call()
            raise self._ended_by or UnavailableError(*REPLACED)
        return call

    async def _open_link(self, link: ServerLink, due_seconds: float) -> StepCall | None:
        if time.monotonic() < link.grpc_until_seconds or self._transport.access.sends_openly(link.address):
            return None
        listener = link.step_listener or await self._ask(link, due_seconds)
        while address := wire_link.listener_address(listener, link.address):
            try:
                call = await self._connect(address, link, listener.server_id, due_seconds)
            except LinkNotReachedError as error:
                failure = error
            else:
                link.grpc_until_seconds, link.num_failed_dials = 0.0, 0
                return call
            before, listener = listener, await self._ask(link, due_seconds)
            if listener == before:
                if not link.grpc_until_seconds:
                    extra = {"address": address, "error": str(failure)}
                    _log.warning("steps not reached, using gRPC", extra=extra)
                break
        link.step_listener = None
        pause_seconds = min(FIRST_GRPC_SECONDS * 2.0 ** min(link.num_failed_dials, 16), GRPC_SECONDS)
        link.num_failed_dials += 1
        link.grpc_until_seconds = time.monotonic() + pause_seconds
        return None

    async def _ask(self, link: ServerLink, due_seconds: float) -> allocator_pb2.StepListener:
        """Asks a server where it takes steps, which extends the lease."""
        request = allocator_pb2.KeepAliveRequest(session_id=self._session_id)
        timeout_seconds = max(due_seconds - time.monotonic(), 0.001)
        sent_seconds, answer = await self._transport.call_at("KeepAlive", request, link, timeout_seconds)
        self._lease_timer.renew(sent_seconds)
        listener: allocator_pb2.StepListener = answer.step_listener
        link.step_listener = listener
        return listener

    def _refusal(self, encoded: bytes) -> KvpoolError:
        """The error that a server has sent on a link."""
        return wire_link.read_refusal(encoded, self._connection.target, self._connection.token_source)

    async def _connect(self, address: str, link: ServerLink, server_id: str, due_seconds: float) -> LinkCall:
        """Makes a link. Raises LinkNotReachedError, or the error of the server.

        The listener shows first that it is the server's: another program at this address learns no token.
        """
        begin_seconds = time.monotonic()
        due_seconds = begin_seconds + min((due_seconds - begin_seconds) / 3, CONNECT_SECONDS)
        is_repeated = link.num_failed_dials > 0
        dial_due_seconds = min(due_seconds, begin_seconds + _DIAL_AGAIN_SECONDS) if is_repeated else due_seconds
        try:
            call = await self._dial(address, dial_due_seconds)
        except (OSError, ValueError) as error:
            raise LinkNotReachedError("NO_LINK", str(error) or "no answer") from None
        link.step_calls.add(call)  # from now on, another thread ends it with the connection
        try:
            probe = secrets.token_bytes(16)
            call.write(encode_frame(wire_link.Kind.PROBE, probe), due_seconds)
            wire_link.check_proof(await call.receive(due_seconds), probe, server_id)
            steps = StepsHello(server_id=server_id, session_id=self._session_id)
            hello = LinkHello(token=link.read_token(), steps=steps)
            call.write(wire_link.hello(hello), due_seconds)
            wire_link.read_welcome(await call.receive(due_seconds))
        except BaseException as error:
            call.cancel()
            link.step_calls.discard(call)
            if isinstance(error, OSError) or (isinstance(error, KvpoolError) and error.reason in wire_link.NO_SERVER):
                raise LinkNotReachedError("NO_LINK", str(error) or "no answer") from None
            raise
        return call

    @abstractmethod
    async def _dial(self, address: str, due_seconds: float) -> LinkCall:
        """Connects to a listener. Raises OSError, or ValueError if a file of the credentials cannot be read."""

    @abstractmethod
    def _open_schedule(self, link: ServerLink) -> StepCall:
        """Makes a call of Schedule for one step."""

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
