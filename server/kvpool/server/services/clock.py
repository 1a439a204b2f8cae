"""The clock of a server: monotonic, without the time during which the process was paused."""

import asyncio
import time
from typing import Final

from kvpool.core.pause_tolerant_clock import MAX_RUN_SECONDS, PauseTolerantClock

_MIN_WAIT_SECONDS: Final = 0.001
_LATE_SECONDS: Final = 0.1
"""Lateness of a wake-up from which the server first handles arrived messages, and the time that it takes for that."""


class ServerClock(PauseTolerantClock):
    """The clock. It runs while a task waits with `sleep_until`."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)

    async def sleep_until(self, due_seconds: float) -> None:
        """Lets the clock run, and waits until a time, for at most half of MAX_RUN_SECONDS.

        Only one task calls this, and calls it again at once. After a late wake-up it waits a little longer: messages
        that have arrived are handled before their senders can be late. After a pause the clock stands still meanwhile.
        """
        start_seconds = time.monotonic()
        self.start()
        wait_seconds = min(max(due_seconds - self.now_seconds(), _MIN_WAIT_SECONDS), MAX_RUN_SECONDS / 2)
        await asyncio.sleep(wait_seconds)
        woken_seconds = time.monotonic()
        if woken_seconds - start_seconds > wait_seconds + _LATE_SECONDS:
            if woken_seconds - start_seconds < MAX_RUN_SECONDS:
                self.start()
            await asyncio.sleep(_LATE_SECONDS)
