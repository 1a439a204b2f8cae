"""Which steps a rank may run: the last check before the device, and the count of what the rank is at. Thread-safe.

1. A step is admitted if its tables were handed out in the epoch that goes on, to a session that has not ended: one that
   the newest fence names as living, or one that was opened after it.
2. A session that has ended stays so for the rest of its epoch, whatever a later fence says.
3. A step is in flight from its check until its ticket is done. Both are one with the check of what is kept out, so that
   none slips in between.
4. When the last step in flight that would no longer be admitted is done, whoever waits is told, by the thread that was
   at it: nobody polls.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self

from kvpool.core.errors import AbortedError
from kvpool.core.ids import TableLease


class StaleTablesError(AbortedError):
    """A step must not run, as its block tables are no longer good; its requests are computed anew.

    NOT_READY: no epoch goes on. EPOCH_PASSED: another does. SESSION_ENDED: its session has; others may have its blocks.
    """


class StepTicket:
    """A step that was admitted, and is in flight until this is done. As a context manager it is done at the end."""

    __slots__ = ("_done", "_lock")

    def __init__(self, done: Callable[[], object]) -> None:
        self._done: Callable[[], object] | None = done
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done()

    def done(self) -> None:
        """Says that the device is through with the step, or that it failed; from any thread. Again it does nothing.

        From then on its blocks may be given to others. A step that was launched is not done: synchronize first, or call
        this when an event that was recorded after it has passed.
        """
        with self._lock:
            done, self._done = self._done, None
        if done:
            done()


class Fence:
    """Admits the steps of one rank."""

    def __init__(self, on_idle: Callable[[], object] = lambda: None) -> None:
        """Begins with no epoch.

        Args:
            on_idle: Called when the last step in flight that would no longer be admitted is done; must return at once.
        """
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._epoch = 0
        self._is_open = False
        self._last_session_number = 0
        self._live: frozenset[int] = frozenset()
        self._in_flight: Counter[TableLease] = Counter()

    @property
    def num_in_flight(self) -> int:
        """Steps that were admitted and are not done."""
        return self._in_flight.total()

    @property
    def is_within_credit(self) -> bool:
        """Whether no step is in flight that would not be admitted now."""
        with self._lock:
            return self._quiet()

    def begin(self, epoch: int) -> None:
        """Begins an epoch, none of whose sessions has ended; its steps are admitted from `open` on."""
        with self._lock:
            self._epoch, self._is_open = epoch, False
            self._last_session_number, self._live = 0, frozenset()

    def open(self, epoch: int) -> None:
        """Lets the steps of the epoch that has begun through, unless it has ended meanwhile."""
        with self._lock:
            self._is_open = epoch == self._epoch

    def end(self) -> None:
        """Ends the epoch: no step is admitted until the next."""
        self.begin(0)

    def narrow(self, last_session_number: int, live: Collection[int]) -> None:
        """Keeps out all sessions up to a number but those that live."""
        with self._lock:
            self._live = frozenset(filter(self._lives, live))
            self._last_session_number = max(last_session_number, self._last_session_number)

    def step(self, lease: TableLease) -> StepTicket:
        """Admits a step, which is in flight until its ticket is done. Costs a lock, and no message.

        Args:
            lease: The scheduler's `Session.table_lease`, sent along with its block tables.

        Raises:
            StaleTablesError: It must not run.
        """
        with self._lock:
            if not self._is_open:
                message = f"a step of epoch {lease.epoch}, while none goes on"
                raise StaleTablesError("NOT_READY", message, field="epoch")
            if lease.epoch != self._epoch:
                message = f"{lease.epoch} is not the epoch that goes on, {self._epoch}"
                raise StaleTablesError("EPOCH_PASSED", message, field="epoch")
            if not self._lives(lease.session_number):
                message = f"session {lease.session_number} has ended, and others may have its blocks"
                raise StaleTablesError("SESSION_ENDED", message, field="session_number")
            self._in_flight[lease] += 1
        return StepTicket(lambda: self._finish(lease))

    def _finish(self, lease: TableLease) -> None:
        with self._lock:
            self._in_flight[lease] -= 1
            if not self._in_flight[lease]:
                del self._in_flight[lease]
            tells = not self._admits(lease) and self._quiet()
        if tells:
            self._on_idle()

    def _quiet(self) -> bool:
        return all(map(self._admits, self._in_flight))

    def _admits(self, lease: TableLease) -> bool:
        return lease.epoch == self._epoch and self._lives(lease.session_number)

    def _lives(self, session_number: int) -> bool:
        return session_number > self._last_session_number or session_number in self._live
