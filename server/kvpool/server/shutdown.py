"""When a server stops: at once, or when its sessions are closed or their time is up.

1. A server that is to stop takes no new sessions.
2. What a signal asked for is not taken back; what an operator asked for is, until it happens.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from kvpool.core.errors import UnavailableError

STOPPING_RETRY_SECONDS: Final = 5.0
"""Long enough for a successor to be there."""
_LOOK_SECONDS: Final = 0.1


class Ending:
    """When one server stops.

    Args:
        count_sessions: Tells how many sessions are open.
        now_seconds: The monotonic clock.
    """

    def __init__(self, count_sessions: Callable[[], int], now_seconds: Callable[[], float]) -> None:
        self._count_sessions = count_sessions
        self._now_seconds = now_seconds
        self._due_seconds: float | None = None
        self._is_final = False
        self._asked = asyncio.Event()

    @property
    def is_asked(self) -> bool:
        """Whether the server is to stop."""
        return self._due_seconds is not None

    def check_not_asked(self) -> None:
        """Raises UnavailableError if the server is to stop, and so takes no new sessions."""
        if self.is_asked:
            message = "the server is about to stop and takes no new sessions"
            raise UnavailableError("DRAINED", message, field="pool_name", retry_seconds=STOPPING_RETRY_SECONDS)

    def ask(self, timeout_seconds: float) -> None:
        """Stops the server once no session is open, in so many seconds at the latest; the last who asks decides."""
        if not self._is_final:
            self._due_seconds = self._now_seconds() + timeout_seconds
            self._asked.set()

    def signal(self, timeout_seconds: float) -> None:
        """Asks for good; asked so a second time, the server stops at once."""
        due_seconds = self._now_seconds() + (0.0 if self._is_final else timeout_seconds)
        self._due_seconds = due_seconds if self._due_seconds is None else min(due_seconds, self._due_seconds)
        self._is_final = True
        self._asked.set()

    def take_back(self) -> None:
        """Goes on taking sessions, unless a signal asked for the end."""
        if not self._is_final:
            self._due_seconds = None
            self._asked.clear()

    async def wait(self) -> None:
        """Waits until it is time to stop."""
        while self._due_seconds is None or (self._count_sessions() and self._now_seconds() < self._due_seconds):
            wait_seconds = _LOOK_SECONDS if self.is_asked else None
            self._asked.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self._asked.wait()
