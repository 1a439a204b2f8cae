"""Holds back what leaves a primary until the in-sync members have what it depends on.

1. What leaves depends on every record so far. It waits for the last position (`Replica`, I3).
2. An answer without a record after its call arrived waits for a mark that was sent after that (I7).
3. The wait begins when the turn is over, so it delays one call and not the others.
4. A wait is bounded. Then the call is refused, and its caller repeats it: the record stays, and so does its result. A
   rank whose stream ends so looks for another primary, and joins this one again if there is none.
"""

import asyncio
import time
from collections import deque

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.statistics import Histogram
from kvpool.server.cluster.replica import Replica
from kvpool.server.cluster.replicator import Replicator
from kvpool.server.metrics.observations import STEP_BOUNDS_SECONDS

RETRY_SECONDS = 0.1
_STUCK_SECONDS = 0.5
"""Time without a confirmation after which nothing leaves for now: a primary sends a mark each 0.1 s."""


class Gate:
    """The gate of one server.

    Args:
        replica: Knows what is confirmed.
        replicator: Sends marks to the standbys.
        max_wait_seconds: Maximum time for a wait.

    Attributes:
        waits: Durations of the waits, those that ended with an error included.
    """

    def __init__(self, replica: Replica, replicator: Replicator, max_wait_seconds: float) -> None:
        self._replica = replica
        self._replicator = replicator
        self._max_wait_seconds = max_wait_seconds
        self.waits = Histogram(STEP_BOUNDS_SECONDS)
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()  # by position
        self._closed_by: KvpoolError | None = None
        self._confirmed = replica.confirmed
        self._progress_seconds = float("-inf")

    @property
    def position(self) -> int:
        """The last position."""
        return self._replica.last_position

    def is_confirming(self) -> bool:
        """Whether a position was confirmed a short time ago."""
        return time.monotonic() - self._progress_seconds < _STUCK_SECONDS

    async def wait(self, arrived: int | None) -> None:
        """Waits until an output may leave.

        Args:
            arrived: The last position when the call arrived; None for what is sent without a call.

        Raises:
            UnavailableError: It is not confirmed in time, or another server has become the primary.
        """
        if self._closed_by:
            raise self._closed_by
        if self._replica.last_position == arrived:
            self._replicator.mark()
        position = self._replica.last_position
        if self._replica.confirmed >= position:
            return
        released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((position, released))
        start_seconds = time.monotonic()
        try:
            async with asyncio.timeout(self._max_wait_seconds):
                await released
        except TimeoutError:
            message = f"the standbys have not confirmed it within {self._max_wait_seconds:g} s"
            raise UnavailableError("NOT_CONFIRMED", message, retry_seconds=RETRY_SECONDS) from None
        finally:
            self.waits.observe(time.monotonic() - start_seconds)
            while self._waiting and self._waiting[0][1].done():  # also those that timed out or were cancelled
                self._waiting.popleft()

    def release(self, confirmed: int) -> None:
        """Ends the waits for positions up to the confirmed one."""
        if confirmed > self._confirmed:
            self._progress_seconds = time.monotonic()
        self._confirmed = confirmed
        while self._waiting and self._waiting[0][0] <= confirmed:
            released = self._waiting.popleft()[1]
            if not released.done():
                released.set_result(None)

    def close(self, error: KvpoolError) -> None:
        """Ends all waits, and later ones, with an error."""
        self._closed_by = error
        for _, released in self._waiting:
            if not released.done():
                released.set_exception(error)
        self._waiting.clear()
