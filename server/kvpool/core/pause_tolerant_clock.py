"""A monotonic clock that excludes time during which the server process was paused.

1. The clock never goes back, and never runs faster than the clock that it reads.
2. The server starts the clock again and again, well within MAX_RUN_SECONDS. A server that is only late loses no time.
3. MAX_RUN_SECONDS after the last start, the clock stands still. A pause of any length thus counts at most
   MAX_RUN_SECONDS.

A deadline that passes only because the server was paused has therefore not passed when the server resumes. No deadline
needs to be extended.
"""

from collections.abc import Callable
from typing import Final

MAX_RUN_SECONDS: Final = 0.5


class PauseTolerantClock:
    """The clock. It starts at the time that the source clock shows, and stands still.

    Args:
        source_seconds: Reads the source clock, which is monotonic.
    """

    def __init__(self, source_seconds: Callable[[], float]) -> None:
        self._source_seconds = source_seconds
        self._stop_seconds = source_seconds()
        self._paused_seconds = 0.0

    def now_seconds(self) -> float:
        """The time in seconds."""
        source_seconds = self._source_seconds()
        if source_seconds > self._stop_seconds:  # noqa: PLR1730 - min() is slower, and every step reads the clock
            source_seconds = self._stop_seconds
        return source_seconds - self._paused_seconds

    def start(self) -> None:
        """Lets the clock run for MAX_RUN_SECONDS from now on."""
        source_seconds = self._source_seconds()
        self._paused_seconds += max(source_seconds - self._stop_seconds, 0.0)
        self._stop_seconds = source_seconds + MAX_RUN_SECONDS

    def advance_to(self, seconds: float) -> None:
        """Continues from the time of another clock, if that was later."""
        self._paused_seconds -= max(seconds - self.now_seconds(), 0.0)
