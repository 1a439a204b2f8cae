"""Admission of a rank's steps: the last check before the device, and the steps in flight. Thread-safe.

1. A step is admitted if its block tables were handed out in the current epoch to a live session: one that the newest
   fence lists as live, or one that was opened after that fence.
2. A session that has ended stays ended for the rest of its epoch, even if a later fence lists it.
3. A step is in flight from its admission until its ticket is done. One lock covers admission, completion and the
   change of the fence, so no step is admitted in between.
4. A stale step is one that would no longer be admitted. When the last stale step in flight of a session is done,
   `on_stale_end` is called by the thread that finished the step.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Self

from kvpool.core.errors import AbortedError
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import MappingProcess


class StaleTablesError(AbortedError):
    """A step must not run because its block tables are no longer valid; its requests must be computed again.

    NOT_READY: no epoch is open. EPOCH_PASSED: another epoch is open. SESSION_ENDED: the session has ended, and other
    sessions may own its blocks.
    """


class StepTicket:
    """An admitted step, in flight until `done` is called. As a context manager it calls `done` at the end."""

    __slots__ = ("_done", "_lock")

    def __init__(self, done: Callable[[], object]) -> None:
        self._done: Callable[[], object] | None = done
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.done()

    def done(self) -> None:
        """Reports that the step has finished on the device, or has failed. Any thread may call it; repeats do nothing.

        Afterwards its blocks may be given to other sessions. A launched step is not done: synchronize first, or call
        this after an event recorded behind the step has completed.
        """
        with self._lock:
            done, self._done = self._done, None
        if done:
            done()


class Fence:
    """Admits the steps of one rank.

    Attributes:
        epoch: The epoch that has begun; 0 for none. Callers read the attributes, and do not set them.
        last_session_number: Newest session number that a fence named.
        live: Numbers up to it of sessions that have not ended.
    """

    mapping_processes: tuple[MappingProcess, ...] = ()
    """Steps run in this process."""

    def __init__(self, on_stale_end: Callable[[], object] = lambda: None) -> None:
        """Starts without an epoch.

        Args:
            on_stale_end: Called when the last stale step in flight of a session is done; must not block.
        """
        self._on_stale_end = on_stale_end
        self._lock = threading.Lock()
        self.epoch = 0
        self._is_open = False
        self.last_session_number = 0
        self.live: frozenset[int] = frozenset()
        self._in_flight: Counter[TableLease] = Counter()

    @property
    def num_in_flight(self) -> int:
        """Number of admitted steps that are not done."""
        return self._in_flight.total()

    @property
    def is_drained(self) -> bool:
        """Whether no stale step is in flight."""
        with self._lock:
            return all(map(self.admits, self._in_flight))

    @property
    def pending(self) -> tuple[SessionNumber, ...]:
        """Numbers of the sessions of stale steps in flight, ascending."""
        with self._lock:
            return tuple(sorted(lease.session_number for lease in self._in_flight if not self.admits(lease)))

    def begin(self, epoch: int) -> None:
        """Begins an epoch in which no session has ended. Its steps are admitted after `open`."""
        with self._lock:
            self.epoch, self._is_open = epoch, False
            self.last_session_number, self.live = 0, frozenset()

    def open(self, epoch: int) -> None:
        """Admits steps of an epoch from now on, unless the epoch has ended."""
        with self._lock:
            self._is_open = epoch == self.epoch

    def end(self) -> None:
        """Ends the epoch: no step is admitted until the next epoch is open."""
        self.begin(0)

    def narrow(self, last_session_number: int, live: Collection[int]) -> None:
        """Excludes all sessions up to a number, except those that are live."""
        with self._lock:
            self.live = frozenset(filter(self._is_live, live))
            self.last_session_number = max(last_session_number, self.last_session_number)

    def kill(self, leases: Collection[TableLease]) -> None:
        """Does nothing: steps run in this process."""

    def step(self, lease: TableLease) -> StepTicket:
        """Admits a step, which is in flight until its ticket is done. Costs a lock and no message.

        Args:
            lease: The scheduler's `Session.table_lease`, sent with the block tables.

        Raises:
            StaleTablesError: The step must not run.
        """
        with self._lock:
            if not self._is_open:
                message = f"a step of epoch {lease.epoch}, and no epoch is open"
                raise StaleTablesError("NOT_READY", message, field="epoch")
            if lease.epoch != self.epoch:
                message = f"{lease.epoch} is not the current epoch, {self.epoch}"
                raise StaleTablesError("EPOCH_PASSED", message, field="epoch")
            if not self._is_live(lease.session_number):
                message = f"session {lease.session_number} has ended, and other sessions may own its blocks"
                raise StaleTablesError("SESSION_ENDED", message, field="session_number")
            self._in_flight[lease] += 1
        return StepTicket(lambda: self._finish(lease))

    def _finish(self, lease: TableLease) -> None:
        with self._lock:
            self._in_flight[lease] -= 1
            is_stale_end = not self._in_flight[lease] and not self.admits(lease)
            if not self._in_flight[lease]:
                del self._in_flight[lease]
        if is_stale_end:
            self._on_stale_end()

    def admits(self, lease: TableLease) -> bool:
        """Whether a session of this epoch has not ended; a step needs an open epoch besides. Costs no lock."""
        return lease.epoch == self.epoch and self._is_live(lease.session_number)

    def _is_live(self, session_number: int) -> bool:
        return session_number > self.last_session_number or session_number in self.live
