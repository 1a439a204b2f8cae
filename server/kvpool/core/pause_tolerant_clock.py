"""A clock of the time that a server has paid attention: its own absence is nobody's fault.

1. It never goes back, and never faster than the clock that it is read from.
2. A server that is well looks at it every LOOK_SECONDS at least. Where twice that passed between two looks, its process
   was stopped or busy: of that time one LOOK_SECONDS is counted, at whichever call first looks again.

So what was due only because the server was away is not due when it is back, and nothing needs to be prolonged.
"""

from typing import Final

LOOK_SECONDS: Final = 0.25


class PauseTolerantClock:
    """The clock; it starts at what the other shows."""

    def __init__(self, shown_seconds: float) -> None:
        self._last_seconds = shown_seconds
        self._away_seconds = 0.0

    def read(self, shown_seconds: float) -> float:
        """Tells the time.

        Args:
            shown_seconds: What the other clock shows, which never goes back.
        """
        since_seconds = shown_seconds - self._last_seconds
        if since_seconds > 2 * LOOK_SECONDS:
            self._away_seconds += since_seconds - LOOK_SECONDS
        self._last_seconds = shown_seconds
        return shown_seconds - self._away_seconds
