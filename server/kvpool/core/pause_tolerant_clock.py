"""A monotonic clock that excludes time during which the server process was paused.

1. The clock never goes back, and never runs faster than the clock that it reads.
2. A healthy server reads it at least every READ_INTERVAL_SECONDS. If more than twice that time passes between two
   reads, the process was stopped or busy. The clock then counts one READ_INTERVAL_SECONDS, at the next read.

A deadline that passes only because the server was paused has therefore not passed when the server resumes. No deadline
needs to be extended.
"""

from typing import Final

READ_INTERVAL_SECONDS: Final = 0.25


class PauseTolerantClock:
    """The clock. It starts at the time that the source clock shows."""

    def __init__(self, clock_seconds: float) -> None:
        self._last_seconds = clock_seconds
        self._paused_seconds = 0.0

    def read(self, clock_seconds: float) -> float:
        """Returns the time.

        Args:
            clock_seconds: Time on the source clock, which is monotonic.
        """
        since_seconds = clock_seconds - self._last_seconds
        if since_seconds > 2 * READ_INTERVAL_SECONDS:
            self._paused_seconds += since_seconds - READ_INTERVAL_SECONDS
        self._last_seconds = clock_seconds
        return clock_seconds - self._paused_seconds
