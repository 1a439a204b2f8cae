"""A session's stream of steps over gRPC: everything but the I/O."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from kvpool.client import retries
from kvpool.client.lease import now_seconds
from kvpool.client.primary_connection import Link, PrimaryConnection
from kvpool.client.protocol import ends_session
from kvpool.client.transports.transport import OpenedSession
from kvpool.core.errors import InvalidArgumentError, KvpoolError, UnauthenticatedError, WrongStateError
from kvpool.core.steps.columns import Step, StepResult
from kvpool.v1 import step_pb2
from kvpool.wire import steps as wire_steps
from kvpool.wire.protocol_version import PROTOCOL_VERSION, check_server

_TOKEN_PAUSE_SECONDS: Final = 0.5
"""Minimum pause before a step is sent again whose token was refused."""


class ServerLink(Link, Protocol):
    """A connection to one server. The methods of its stubs return awaitables, or block: see the subclasses."""

    @property
    def allocator(self) -> Any:  # noqa: ANN401 - the stub for asyncio, or the blocking one
        """The stub of AllocatorService."""

    @property
    def directory(self) -> Any:  # noqa: ANN401 - as above
        """The stub of DirectoryService."""


_LinkT = TypeVar("_LinkT", bound=ServerLink)


class StepStream(ABC, Generic[_LinkT]):
    """One session's stream of steps, reopened after it breaks, at the primary. Keeps the session alive.

    Attributes:
        lease_timer: The time for which the session's lease is certain to last.
    """

    def __init__(
        self,
        opened: OpenedSession,
        deadline_seconds: float,
        connection: PrimaryConnection[_LinkT],
        renew: Callable[[str, float], Awaitable[float]],
    ) -> None:
        self._connection = connection
        self._renew_lease = renew
        self.lease_timer = opened.lease_timer
        self._session_id = opened.session_id
        self._deadline_seconds = deadline_seconds
        self._period_seconds = min(opened.lease_seconds / 3, deadline_seconds / 4)
        self._link: _LinkT | None = None
        """The link of the call."""
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
            link = await self._connection.link()
            self._use(link)
            self._state_version(message)
            await self._write_ahead(message, link)
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
        search, exchange = self._connection.new_search(), partial(self._exchange_once, message)

        async def exchange_at_primary(left_seconds: float) -> step_pb2.StepResult:
            return await self._connection.call(exchange, search, left_seconds)

        result = await retries.call(exchange_at_primary, self._deadline_seconds, self._sleep)
        return wire_steps.result_from_proto(result)

    def close(self) -> None:
        """Ends the stream, and stops keeping the session alive."""
        self._is_closed = True
        self.end_call()

    def _use(self, link: _LinkT) -> None:
        """Ends a call over another link: the server at its end is no longer the primary."""
        if self._link is not link:
            self.end_call()
            self._link = link

    def _state_version(self, message: step_pb2.Step) -> None:
        """Adds the version to the first step of a call. The first result carries the server's."""
        if not self._has_call:
            message.protocol_version = PROTOCOL_VERSION
            self._is_version_checked = False

    @abstractmethod
    def end_call(self) -> None:
        """Cancels the call: its next answer could be mistaken for that of a later step."""

    @abstractmethod
    async def _write(self, message: step_pb2.Step, link: _LinkT) -> None:
        """Sends a step, on a new call over a link if there is none. A broken call is reported by `_read`."""

    async def _write_ahead(self, message: step_pb2.Step, link: _LinkT) -> None:
        """Sends a step that `exchange` waits for later."""
        await self._write(message, link)

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

    async def _exchange_once(self, message: step_pb2.Step, link: _LinkT, timeout_seconds: float) -> step_pb2.StepResult:
        """Makes one attempt. A transport limits its time."""
        del timeout_seconds
        if self._is_closed:
            raise closed_session_error()
        if self._ended_by:
            raise self._ended_by
        try:
            ahead, self._ahead = self._ahead, None
            self._use(link)
            sent_seconds = now_seconds()
            if ahead and ahead[0] is message and self._has_call:
                sent_seconds = ahead[1]
            else:
                self._state_version(message)
                await self._write(message, link)
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

    async def _renew(self) -> None:
        """Extends the lease once. Raises KvpoolError."""
        self.lease_timer.renew(await self._renew_lease(self._session_id, self._period_seconds))

    def _note_failed_renewal(self, error: KvpoolError) -> bool:
        """Returns whether the session has ended, after KeepAlive failed. The next step then raises the error."""
        if ends_session(error):
            self.lease_timer.end()
            self._ended_by = error
        return self._ended_by is not None


def closed_session_error() -> WrongStateError:
    """Makes the error of a step of a session that this process has closed."""
    return WrongStateError("CLOSED", "the session was closed in this process, or its client")
