"""The time for which a session's lease is certain to last, as its client knows it."""

import time
from math import inf
from typing import Final

_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)
"""A clock that includes the time in which the machine sleeps, as the server's may; else the monotonic clock."""

FRESH_SECONDS: Final = 1.0
"""Maximum age of the server's last answer when the client answers on credit: the session may have ended since."""


def now_seconds() -> float:
    """Reads the clock of leases, which is independent of wall-clock time."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class LeaseTimer:
    """Counts a lease from the time at which the last answered call was sent: the server received it no earlier.

    One thread may renew it while another reads.

    Attributes:
        lease_seconds: The lease; infinity if it never expires, 0 once the session is over.
    """

    def __init__(self, lease_seconds: float, sent_seconds: float) -> None:
        """Starts at the call that opened the session.

        Args:
            lease_seconds: See the class.
            sent_seconds: When that call was sent, by `now_seconds`.
        """
        self.lease_seconds = lease_seconds
        self._sent_seconds = sent_seconds

    def renew(self, sent_seconds: float) -> None:
        """Restarts the count at the time at which a call was sent that has been answered."""
        self._sent_seconds = max(self._sent_seconds, sent_seconds)

    def end(self) -> None:
        """Ends the lease, when the session is over."""
        self.lease_seconds = 0.0

    @property
    def is_fresh(self) -> bool:
        """Whether the session was certainly open a moment ago, so that the client may answer on credit."""
        unseen_seconds = now_seconds() - self._sent_seconds
        return self.lease_seconds == inf or unseen_seconds < min(self.lease_seconds, FRESH_SECONDS)

    @property
    def left_seconds(self) -> float:
        """Time for which the lease is certain to last; 0 when it may have expired."""
        return max(self._sent_seconds + self.lease_seconds - now_seconds(), 0.0)
