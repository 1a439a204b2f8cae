"""How long a session's lease is sure to last, as its client can know it."""

import time
from math import inf
from typing import Final

_CLOCK: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)
"""Goes on while the machine sleeps, as the server's may; where there is none, the monotonic clock."""


FRESH_SECONDS: Final = 1.0
"""How long an answer of the server is good for answers in its place: it may have ended the session since."""


def now_seconds() -> float:
    """The clock by which leases are counted here; wall-clock time has no part in it."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class LeaseTimer:
    """Counts from when the last call that was answered had been sent: the server heard of it no earlier.

    One thread may renew it while another reads.
    """

    def __init__(self, lease_seconds: float, sent_seconds: float) -> None:
        """Starts with the call that opened the session.

        Args:
            lease_seconds: The lease; infinity if it never runs out.
            sent_seconds: When that call was sent, by `now_seconds`.
        """
        self._lease_seconds = lease_seconds
        self._sent_seconds = sent_seconds

    def renew(self, sent_seconds: float) -> None:
        """Takes note of an answer to a call that was sent then."""
        self._sent_seconds = max(self._sent_seconds, sent_seconds)

    def end(self) -> None:
        """Takes note that the session is over: nothing renews it any more."""
        self._lease_seconds = 0.0

    @property
    def is_fresh(self) -> bool:
        """Whether the session was there a moment ago, as far as this process knows: it may answer in its place."""
        unseen_seconds = now_seconds() - self._sent_seconds
        return self._lease_seconds == inf or unseen_seconds < min(self._lease_seconds, FRESH_SECONDS)

    @property
    def left_seconds(self) -> float:
        """How long it is sure to last; 0 when it may have run out."""
        return max(self._sent_seconds + self._lease_seconds - now_seconds(), 0.0)
