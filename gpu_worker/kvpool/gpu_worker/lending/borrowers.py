"""The processes that may write to a rank's memory, and the sessions whose steps they run. Thread-safe, no I/O.

1. A process runs steps of sessions that it has named only. A session that has ended, or of another epoch, cannot be
   named.
2. A session is pending while a process that maps the memory has named it, the session or its epoch has ended, and the
   process has neither answered the fence that excludes the session, nor unmapped the memory, nor exited.
3. A process counts until it has exited. A broken connection changes nothing: the process may still write.
4. A fence is sent to a process when it excludes a session of the process, and when the process maps the memory again.
5. What a process may write is written down before the process may write it. What it may write no more is written down
   if that is possible: a list that is too long makes a later process of the rank wait for more than it needs to.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.errors import UnavailableError
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.gpu_worker.fence import Fence
from kvpool.gpu_worker.lending.memory_folder import PastBorrower


@dataclass(frozen=True, slots=True)
class FenceSent:
    """The sessions whose steps may run; see LendFence in lending.proto."""

    fence_sequence: int
    epoch: int
    last_session_number: int
    live_session_numbers: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Borrower:
    """A process of an engine, or one of several uses of the memory within a process.

    Attributes:
        pid: The process.
        started_ticks: When it started, since the start of the machine.
        client_id: The use of the memory within the process.
        name: Its name, for display.
        maps: Whether it may map the memory.
        epoch: The epoch in which it mapped the memory; 0 if it did not.
        leases: The sessions that it has named; if it maps the memory, without those whose end it has answered.
        send: Sends it a fence; None while it has no connection on which it mapped the memory.
        fence_sequence: The newest fence on that connection; 0 for none.
    """

    pid: int
    started_ticks: int
    client_id: str
    name: str
    maps: bool = False
    epoch: int = 0
    leases: set[TableLease] = field(default_factory=set)
    send: Callable[[FenceSent], None] | None = None
    fence_sequence: int = 0


class Borrowers:
    """The processes, and the fence of the rank; see `RankFence`."""

    def __init__(self, on_change: Callable[[list[PastBorrower]], None]) -> None:
        """Starts without processes and without an epoch.

        Args:
            on_change: Called with all processes that may map the memory, before a process may write under the change;
                must not call back.
        """
        self._on_change: Final = on_change
        self._on_stale_end: Callable[[], None] = lambda: None
        self._lock: Final = threading.Lock()
        self._admission = Fence()
        self._epoch = 0
        self._last_session_number = 0
        self._live: tuple[int, ...] = ()
        self._all: dict[tuple[int, int, str], Borrower] = {}
        """By process id, start time and client id."""

    def attach(self, on_stale_end: Callable[[], None]) -> "Borrowers":
        """Sets the function to call when a session is no longer pending; returns this object, the fence of a rank."""
        self._on_stale_end = on_stale_end
        return self

    # The fence of the rank.

    @property
    def num_in_flight(self) -> int:
        """Number of pending sessions."""
        with self._lock:
            return len(self._stale_leases())

    @property
    def is_drained(self) -> bool:
        """Whether no session is pending."""
        return not self.num_in_flight

    @property
    def pending(self) -> tuple[SessionNumber, ...]:
        """Numbers of the pending sessions, ascending."""
        with self._lock:
            return tuple(sorted({lease.session_number for lease in self._stale_leases()}))

    def begin(self, epoch: int) -> None:
        """Begins an epoch, see `RankFence.begin`."""
        with self._lock:
            self._admission.begin(epoch)
            self._fence_off(epoch, 0, ())

    def open(self, epoch: int) -> None:
        """Admits sessions of an epoch from now on, unless the epoch has ended."""
        with self._lock:
            self._admission.open(epoch)

    def end(self) -> None:
        """Ends the epoch: no session is admitted until the next epoch is open."""
        self.begin(0)

    def narrow(self, last_session_number: int, live: Iterable[int]) -> None:
        """Excludes all sessions up to a number, except those that are live."""
        with self._lock:
            live = tuple(live)
            self._admission.narrow(last_session_number, live)
            self._fence_off(self._epoch, last_session_number, live)

    # The processes.

    def all(self) -> list[Borrower]:
        """The processes."""
        with self._lock:
            return list(self._all.values())

    @property
    def num_mapping(self) -> int:
        """Number of processes that may map the memory."""
        with self._lock:
            return sum(each.maps for each in self._all.values())

    def restore(self, past: PastBorrower) -> Borrower:
        """Adds a process that mapped the memory before, and that is still alive."""
        borrower = self.add(past.pid, past.started_ticks, past.client_id, past.name)
        borrower.maps, borrower.leases = True, set(past.leases)
        return borrower

    def add(self, pid: int, started_ticks: int, client_id: str, name: str) -> Borrower:
        """Returns the entry of a process, which is new if it was not known."""
        with self._lock:
            key = pid, started_ticks, client_id
            return self._all.setdefault(key, Borrower(pid, started_ticks, client_id, name))

    def map(self, borrower: Borrower, send: Callable[[FenceSent], None]) -> None:
        """Records that a process maps the memory, on a connection with fences of its own.

        Raises:
            UnavailableError: This cannot be written down; nothing is changed.
        """
        with self._lock:
            before, borrower.maps = borrower.maps, True
            try:
                self._save()
            except OSError as error:
                borrower.maps = before
                raise _not_written(error) from error
            borrower.epoch = self._epoch
            borrower.send, borrower.fence_sequence = send, 0
            if any(map(self._is_stale, borrower.leases)):
                self._send(borrower)

    def bind(self, borrower: Borrower, lease: TableLease) -> None:
        """Records that a process will run steps of a session.

        Raises:
            StaleTablesError: The session has ended, or another epoch is open.
            UnavailableError: This cannot be written down; nothing is changed.
        """
        with self._lock:
            self._admission.step(lease).done()
            if lease in borrower.leases:
                return
            borrower.leases.add(lease)
            try:
                self._save()
            except OSError as error:
                borrower.leases.remove(lease)
                raise _not_written(error) from error

    def disconnect(self, borrower: Borrower, send: Callable[[FenceSent], None] | None) -> None:
        """Records the end of a connection, if `send` is still that of the process."""
        with self._lock:
            if borrower.send is send:
                borrower.send = None

    def answered(self, borrower: Borrower, fence_sequence: int) -> None:
        """Records that a process runs no step that the fence excludes."""
        with self._lock:
            if fence_sequence != borrower.fence_sequence:
                return  # a newer fence is on its way
            borrower.leases = {lease for lease in borrower.leases if not self._is_stale(lease)}
            self._save_if_possible()
        self._on_stale_end()

    def unmap(self, borrower: Borrower) -> None:
        """Records that a process runs no step any more."""
        with self._lock:
            borrower.maps, borrower.send = False, None
            borrower.leases.clear()
            self._save_if_possible()
        self._on_stale_end()

    def exited(self, borrower: Borrower) -> tuple[TableLease, ...]:
        """Removes a process that has exited. Returns the sessions that it had named and that may be open."""
        with self._lock:
            self._all.pop((borrower.pid, borrower.started_ticks, borrower.client_id), None)
            gone = tuple(lease for lease in borrower.leases if not (self._epoch and self._is_stale(lease)))
            borrower.leases, borrower.send = set(), None
            self._save_if_possible()
        self._on_stale_end()
        return gone

    # The methods below need the lock.

    def _save_if_possible(self) -> None:
        with contextlib.suppress(OSError):
            self._save()

    def _save(self) -> None:
        mapping = (each for each in self._all.values() if each.maps)
        self._on_change(
            [
                PastBorrower(
                    each.pid,
                    each.started_ticks,
                    each.client_id,
                    each.name,
                    tuple(sorted((lease.epoch, int(lease.session_number)) for lease in each.leases)),
                )
                for each in mapping
            ]
        )

    def _is_stale(self, lease: TableLease) -> bool:
        number = lease.session_number
        is_live = number > self._last_session_number or number in self._live
        return lease.epoch != self._epoch or not is_live

    def _stale_leases(self) -> list[TableLease]:
        return [lease for each in self._all.values() if each.maps for lease in each.leases if self._is_stale(lease)]

    def _fence_off(self, epoch: int, last_session_number: int, live: tuple[int, ...]) -> None:
        before = {each: sum(map(self._is_stale, each.leases)) for each in self._all.values()}
        self._epoch, self._last_session_number, self._live = epoch, last_session_number, live
        for borrower, num_stale in before.items():
            if borrower.maps and sum(map(self._is_stale, borrower.leases)) > num_stale:
                self._send(borrower)

    def _send(self, borrower: Borrower) -> None:
        if borrower.send:
            borrower.fence_sequence += 1
            epoch = self._epoch if borrower.epoch == self._epoch else 0  # a later epoch may have other memory
            borrower.send(FenceSent(borrower.fence_sequence, epoch, self._last_session_number, self._live))


def _not_written(error: OSError) -> UnavailableError:
    message = f"the lender cannot write down which processes map the memory: {error.strerror}"
    return UnavailableError("NOT_WRITTEN", message, retry_seconds=1.0)
