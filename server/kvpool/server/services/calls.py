"""Long-lived calls that a server can end: streams, watches, and calls that wait for the ranks of a pool."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from kvpool.core.errors import AbortedError, KvpoolError
from kvpool.core.ids import SessionId
from kvpool.core.sessions.session_ends import ended_error
from kvpool.server.auth.caller import CALLER
from kvpool.server.shutdown import Shutdown


class OpenCall:
    """A long-lived call, in the current task, that the server can end while it waits for its next message or the pool.

    Attributes:
        caller: The holder of the call's token; None without tokens.
        waiting: Whether the call waits.
        ended_by: The error that it was ended with; None if it was not.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.caller = CALLER.get()
        self.waiting = False
        self.ended_by: KvpoolError | None = None

    async def wait_ended(self) -> None:
        """Waits until the call's task has ended."""
        if self._task:
            await asyncio.wait((self._task,))

    def end(self, error: KvpoolError) -> None:
        """Ends the call with `error`: now if it waits, otherwise once it has answered its current message."""
        if self.ended_by:
            return
        self.ended_by = error
        if self.waiting and self._task:
            self._task.cancel()

    def wait(self) -> Self:
        """Returns a context manager around a wait. It raises the error that the call was ended with."""
        return self  # every step waits, and a generator would take three times as long

    def __enter__(self) -> None:
        if self.ended_by:
            raise self.ended_by
        self.waiting = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting = False
        if self.ended_by and isinstance(error, asyncio.CancelledError):
            raise self.ended_by from None


class Calls:
    """The long-lived calls of a server that are open now.

    Args:
        shutdown: When the server stops.
        on_session_end: Called with each session that has ended.
    """

    def __init__(self, shutdown: Shutdown, on_session_end: Callable[[SessionId], None]) -> None:
        self._shutdown = shutdown
        self._on_session_end = on_session_end
        self._calls: dict[OpenCall, None] = {}  # in the order in which they began
        self._by_session: dict[SessionId, list[OpenCall]] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenCall]:
        """Registers the current task's call, so that a stop of the server ends it."""
        self._shutdown.check_not_stopping()
        call = OpenCall()
        self._calls[call] = None
        try:
            yield call
        finally:
            del self._calls[call]

    @contextlib.contextmanager
    def of_session(self, session_id: SessionId, stream: OpenCall) -> Iterator[None]:
        """Registers an open call as the stream of a session, and ends the older one."""
        streams = self._by_session.setdefault(session_id, [])
        for older in streams:
            older.end(AbortedError("STREAM_SUPERSEDED", "another stream of this session took over"))
        streams.append(stream)
        try:
            yield
        finally:
            streams.remove(stream)
            if not streams:
                del self._by_session[session_id]

    def all_open(self) -> tuple[OpenCall, ...]:
        """All open calls."""
        return tuple(self._calls)

    def end(self, session_id: SessionId, reason: str) -> None:
        """Ends the calls of a session that ended for this reason; see `ended_error`."""
        for call in self._by_session.get(session_id, ()):
            call.end(ended_error(reason))
        self._on_session_end(session_id)

    def end_all(self, error: KvpoolError) -> None:
        """Ends each open call once it has answered its current message."""
        for call in self.all_open():
            call.end(error)
