"""Decides when a server stops: at once, or when its sessions are closed or a timeout is over.

1. A server that is about to stop takes no new sessions. One that is stopping takes no new calls that change pools.
2. A stop requested by a signal cannot be cancelled. A stop requested by an operator can, until it happens.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from kvpool.core.errors import UnavailableError

DRAIN_RETRY_SECONDS: Final = 1.0
STOPPING_RETRY_SECONDS: Final = 5.0
"""Long enough for the next server to start."""
_POLL_SECONDS: Final = 0.1
"""Interval at which a requested stop checks the number of sessions."""


class Shutdown:
    """The time at which one server stops.

    Args:
        count_sessions: Returns the number of open sessions.
        now_seconds: Returns the monotonic time. The clock of leases does not serve: it stands still if a bug ends the
            task that lets it run.

    Attributes:
        is_stopping: Whether the server has started to stop. An operator's drain of pools is a different state:
            `PoolRegistry`.
    """

    def __init__(self, count_sessions: Callable[[], int], now_seconds: Callable[[], float] = time.monotonic) -> None:
        self._count_sessions = count_sessions
        self._now_seconds = now_seconds
        self._due_seconds: float | None = None
        self._is_final = False
        self._requested = asyncio.Event()
        self.is_stopping = False

    @property
    def is_requested(self) -> bool:
        """Whether a stop was requested."""
        return self._due_seconds is not None

    @property
    def is_about_to_stop(self) -> bool:
        """Whether the server is stopping, or a stop was requested."""
        return self.is_stopping or self.is_requested

    def check_not_stopping(self) -> None:
        """Raises UnavailableError if the server is stopping."""
        if self.is_stopping:
            raise stopping_error()

    def check_not_requested(self) -> None:
        """Raises UnavailableError if a stop was requested, because the server then takes no new sessions."""
        if self.is_requested:
            message = "the server is about to stop and takes no new sessions"
            raise UnavailableError("DRAINED", message, field="pool_name", retry_seconds=STOPPING_RETRY_SECONDS)

    def request(self, timeout_seconds: float) -> None:
        """Requests a stop once no session is open, or after the timeout. A later request replaces an earlier one."""
        if not self._is_final:
            self._due_seconds = self._now_seconds() + timeout_seconds
            self._requested.set()

    def on_signal(self, timeout_seconds: float) -> None:
        """Requests a stop that cannot be cancelled. A second signal stops the server at once."""
        due_seconds = self._now_seconds() + (0.0 if self._is_final else timeout_seconds)
        self._due_seconds = due_seconds if self._due_seconds is None else min(due_seconds, self._due_seconds)
        self._is_final = True
        self._requested.set()

    def cancel(self) -> None:
        """Cancels a requested stop, unless a signal requested it."""
        if not self._is_final:
            self._due_seconds = None
            self._requested.clear()

    async def wait(self) -> None:
        """Waits until the server should stop."""
        while self._due_seconds is None or (self._count_sessions() and self._now_seconds() < self._due_seconds):
            wait_seconds = _POLL_SECONDS if self.is_requested else None
            self._requested.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self._requested.wait()


def stopping_error() -> UnavailableError:
    """Returns the error for calls that a stopping server refuses or ends."""
    return UnavailableError("DRAINING", "the server is stopping", retry_seconds=DRAIN_RETRY_SECONDS)
