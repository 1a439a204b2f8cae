"""The processes that may write to a rank's memory, and the sessions whose steps they run. Thread-safe.

1. A process runs steps of sessions that it has named only. A session that has ended, or of another epoch, cannot be
   named.
2. A session is pending while a process that maps the memory has named it, the session or its epoch has ended, and the
   process has neither answered the fence that excludes the session, nor unmapped the memory, nor exited.
3. A process counts until it has exited. A broken connection changes nothing: the process may still write.
4. A fence is sent to a process that maps the memory when it excludes a session of the process, and when the process
   asks for the memory again. An answer counts on the connection of the fence only.
5. A permission to write is persisted before it is granted: a session is added to the list, which costs the same however
   long the list is. The end of a permission is persisted if possible, those of sessions together once they are half of
   the list: an entry that is left over only makes a later process of the rank wait longer.
6. A process that neither maps the memory nor is connected is forgotten when no session that it has named is open. One
   that has unmapped the memory keeps the sessions that it has named and that are open: its exit ends them, and while
   it is connected, the memory is in use.
7. Only the newest connection of a process that is neither forgotten nor exited maps the memory or names sessions.
8. At most MAX_CONNECTIONS processes and uses are connected, and a process has at most MAX_USES uses of the memory. A
   use has at most MAX_SESSIONS sessions.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from kvpool.core.errors import ExhaustedError, InvalidArgumentError, UnavailableError
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import MAX_MAPPING_PROCESSES, MappingProcess
from kvpool.lending.fence import Fence, StaleTablesError
from kvpool.lending.memory_folder import PastBorrower

MAX_CONNECTIONS: Final = 256
MAX_USES: Final = 64
"""Maximum number of uses of the memory in a process, connected or with a session that is open."""

MAX_SESSIONS: Final = 1024
"""Maximum number of sessions that a use of the memory has named, without those whose end it has answered."""


@dataclass(frozen=True, slots=True)
class FenceSent:
    """The sessions whose steps may run; see LendFence in lending.proto."""

    fence_sequence: int
    epoch: int
    last_session_number: int
    live_session_numbers: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Link:
    """A connection of a process.

    Attributes:
        send: Sends it a fence; any thread may call it, and it must not block.
        maps: Whether fences are sent on it.
        num_fences: Number of fences that were sent on it.
    """

    send: Callable[[FenceSent], None]
    maps: bool = False
    num_fences: int = 0


@dataclass(slots=True, eq=False)
class Borrower:
    """A process of an engine, or one of several uses of the memory within a process.

    Attributes:
        pid: The process.
        started_ticks: When it started, since the start of the machine.
        client_id: The use of the memory within the process.
        name: Its name, for display.
        link: Its connection; None while it has none.
        maps: Whether it may map the memory.
        epoch: The epoch to which the memory belongs that it mapped; 0 if it mapped none.
        leases: The sessions that it has named, without those whose end it has answered.
    """

    pid: int
    started_ticks: int
    client_id: str
    name: str
    link: Link | None = None
    maps: bool = False
    epoch: int = 0
    leases: set[TableLease] = field(default_factory=set)

    @property
    def process(self) -> tuple[int, int]:
        """Its id and start time, which identify it: ids are used again."""
        return self.pid, self.started_ticks


class BorrowerRegistry:
    """The processes, and the fence of the rank, as `Fence` is one of steps."""

    def __init__(
        self,
        on_change: Callable[[list[PastBorrower]], None],
        on_session: Callable[[PastBorrower], None],
        kill: Callable[[Borrower], None] = lambda _: None,
    ) -> None:
        """Starts without processes and without an epoch. Callbacks must not call back.

        Args:
            on_change: Persists all processes that may map the memory, before a change lets a process write.
            on_session: Persists a further session of one of these processes, before its steps may run.
            kill: Kills a process; must not raise.
        """
        self._on_change: Final = on_change
        self._on_session: Final = on_session
        self._kill: Final = kill
        self._on_stale_end: Callable[[], None] = lambda: None
        self._lock: Final = Lock()
        self._admission: Final = Fence()
        self._all: dict[tuple[int, int, str], Borrower] = {}
        """By process id, start time and client id."""
        self._num_left_over = 0
        """Number of sessions that ended since the list was written."""

    def attach(self, on_stale_end: Callable[[], None]) -> "BorrowerRegistry":
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
        """Begins an epoch in which no session has ended; see `Fence.begin`."""
        with self._lock, self._fences_sent():
            self._admission.begin(epoch)

    def open(self, epoch: int) -> None:
        """Admits sessions of an epoch from now on, unless the epoch has ended."""
        with self._lock:
            self._admission.open(epoch)

    def end(self) -> None:
        """Ends the epoch: no session is admitted until the next epoch is open."""
        self.begin(0)

    def narrow(self, last_session_number: int, live: Iterable[int]) -> None:
        """Excludes all sessions up to a number, except those that are live."""
        with self._lock, self._fences_sent():
            self._admission.narrow(last_session_number, tuple(live))

    def kill(self, leases: Collection[TableLease]) -> None:
        """Kills the processes that have named one of these sessions."""
        for borrower in self.all():
            if not borrower.leases.isdisjoint(leases):
                self._kill(borrower)

    # The processes.

    def all(self) -> list[Borrower]:
        """The processes."""
        with self._lock:
            return list(self._all.values())

    @property
    def mapping_processes(self) -> tuple[MappingProcess, ...]:
        """The processes that may map the memory, the newest MAX_MAPPING_PROCESSES."""
        with self._lock:
            found = [MappingProcess(each.pid, each.name) for each in self._all.values() if each.maps]
        return tuple(found[-MAX_MAPPING_PROCESSES:])

    @property
    def num_mapping(self) -> int:
        """Number of processes that may map the memory."""
        with self._lock:
            return sum(each.maps for each in self._all.values())

    @property
    def is_in_use(self) -> bool:
        """Whether a process may map the memory, or is connected and has an open session, for which it may map again."""
        with self._lock:
            return any(each.maps or (each.link and self._open_leases(each)) for each in self._all.values())

    def restore(self, past: PastBorrower, epoch: int) -> Borrower:
        """Adds a process that mapped the memory of an epoch before, and that is still alive."""
        borrower = self._entry(past.pid, past.started_ticks, past.client_id, past.name)
        borrower.maps, borrower.epoch, borrower.leases = True, epoch, set(past.leases)
        return borrower

    def connect(self, pid: int, started_ticks: int, client_id: str, name: str, link: Link) -> Borrower:
        """Returns the entry of a process that has connected, which is new if it was not known.

        Raises:
            ExhaustedError: There are too many connections, or uses of the memory in the process; nothing is changed.
        """
        with self._lock:
            self._check_room(pid, started_ticks, client_id)
            borrower = self._entry(pid, started_ticks, client_id, name)
            borrower.link = link
            return borrower

    def resend_fence(self, borrower: Borrower, link: Link) -> None:
        """Sends the newest fence to a process that asks for memory that it may map already.

        The pool may wait for its answer, and the process for the pool.
        """
        with self._lock:
            if borrower.maps and borrower.link is link:
                link.maps = True
                if self._num_stale(borrower):
                    self._send(borrower, link)

    def map(self, borrower: Borrower, link: Link, epoch: int, announce: Callable[[], None]) -> None:
        """Records that a process maps the memory.

        Args:
            borrower: The process.
            link: Its connection.
            epoch: The epoch to which the memory belongs.
            announce: Sends the memory; called before any later fence is sent.

        Raises:
            StaleTablesError: The epoch has passed meanwhile; nothing is changed.
            UnavailableError: The process is gone, or has a newer connection; or this cannot be written down. Nothing is
                changed.
        """
        with self._lock:
            _check_newest(borrower, link)
            if epoch != self._admission.epoch:
                raise StaleTablesError("EPOCH_PASSED", f"epoch {epoch} has passed", field="epoch")
            before, borrower.maps = borrower.maps, True
            try:
                self._save()
            except OSError as error:
                borrower.maps = before
                raise _not_written(error) from error
            borrower.epoch, link.maps = epoch, True
            announce()
            if self._num_stale(borrower):
                self._send(borrower, link)

    def bind(self, borrower: Borrower, link: Link, lease: TableLease) -> None:
        """Records that a process will run steps of a session.

        Raises:
            StaleTablesError: The session has ended, or another epoch is open.
            UnavailableError: As `map` raises it; nothing is changed.
            ExhaustedError: The process has named MAX_SESSIONS sessions.
        """
        with self._lock:
            _check_newest(borrower, link)
            self._admission.step(lease).done()
            if lease in borrower.leases:
                return
            if len(borrower.leases) >= MAX_SESSIONS:
                message = f"the process has named {MAX_SESSIONS} sessions, the maximum"
                raise ExhaustedError("TOO_MANY_SESSIONS", message, retry_seconds=1.0)
            borrower.leases.add(lease)
            try:
                self._save_session(borrower, lease)
            except OSError as error:
                borrower.leases.remove(lease)
                raise _not_written(error) from error

    def disconnect(self, borrower: Borrower, link: Link) -> list[Borrower]:
        """Records the end of a connection. Returns the processes that are forgotten; see rule 6."""
        with self._lock:
            if borrower.link is link:
                borrower.link = None
            idle = {
                key: each for key, each in self._all.items() if not (each.link or each.maps or self._open_leases(each))
            }
            for key in idle:
                del self._all[key]
            return list(idle.values())

    def fence_answered(self, borrower: Borrower, link: Link, fence_sequence: int) -> None:
        """Records that a process runs no step that the fence excludes.

        Raises:
            InvalidArgumentError: The fence was not sent on this connection.
        """
        with self._lock:
            if not 1 <= fence_sequence <= link.num_fences:
                message = f"{fence_sequence} was not sent; the newest fence is {link.num_fences}"
                raise InvalidArgumentError("fenced.fence_sequence", message)
            if borrower.link is not link or fence_sequence < link.num_fences:
                return  # a newer fence is on its way
            num_leases = len(borrower.leases)
            borrower.leases = {lease for lease in borrower.leases if self._admission.admits(lease)}
            self._num_left_over += num_leases - len(borrower.leases)
            if self._num_left_over >= len(borrower.leases):
                self._save_if_possible()
        self._on_stale_end()

    def unmap(self, borrower: Borrower, link: Link) -> None:
        """Records that a process runs no step until it maps the memory again."""
        with self._lock:
            if borrower.link is not link:
                return
            borrower.maps = link.maps = False
            borrower.leases = set(self._open_leases(borrower))
            self._save_if_possible()
        self._on_stale_end()

    def remove_exited(self, borrower: Borrower) -> tuple[TableLease, ...]:
        """Removes a process that has exited. Returns the sessions that it had named and that may be open."""
        with self._lock:
            self._all.pop((borrower.pid, borrower.started_ticks, borrower.client_id), None)
            gone = tuple(self._open_leases(borrower))
            borrower.leases, borrower.link = set(), None
            self._save_if_possible()
        self._on_stale_end()
        return gone

    # The methods below need the lock.

    def _entry(self, pid: int, started_ticks: int, client_id: str, name: str) -> Borrower:
        return self._all.setdefault((pid, started_ticks, client_id), Borrower(pid, started_ticks, client_id, name))

    def _check_room(self, pid: int, started_ticks: int, client_id: str) -> None:
        known = self._all.get((pid, started_ticks, client_id))
        if not known and sum(each.process == (pid, started_ticks) for each in self._all.values()) >= MAX_USES:
            message = f"process {pid} uses the memory {MAX_USES} times, the maximum"
            raise ExhaustedError("TOO_MANY_CONNECTIONS", message, retry_seconds=1.0)
        if not (known and known.link) and sum(each.link is not None for each in self._all.values()) >= MAX_CONNECTIONS:
            message = f"the lender has {MAX_CONNECTIONS} connections, the maximum"
            raise ExhaustedError("TOO_MANY_CONNECTIONS", message, retry_seconds=1.0)

    def _save_if_possible(self) -> None:
        with contextlib.suppress(OSError):
            self._save()

    def _save(self) -> None:
        self._on_change([_past(each, each.leases) for each in self._all.values() if each.maps])
        self._num_left_over = 0

    def _save_session(self, borrower: Borrower, lease: TableLease) -> None:
        """Persists a session of a process, which may not map the memory yet."""
        if not borrower.maps:
            return
        try:
            self._on_session(_past(borrower, (lease,)))
        except OSError:  # somebody deleted the list, or it is torn
            self._save()

    def _open_leases(self, borrower: Borrower) -> list[TableLease]:
        """The sessions of a process that may be open: all of them while no epoch has begun, as one may go on."""
        admission = self._admission
        return [lease for lease in borrower.leases if not admission.epoch or admission.admits(lease)]

    def _num_stale(self, borrower: Borrower) -> int:
        return sum(not self._admission.admits(lease) for lease in borrower.leases)

    def _stale_leases(self) -> list[TableLease]:
        mapping = (each for each in self._all.values() if each.maps)
        return [lease for each in mapping for lease in each.leases if not self._admission.admits(lease)]

    @contextlib.contextmanager
    def _fences_sent(self) -> Iterator[None]:
        """Sends a fence to each process of which a change of the admission excludes sessions."""
        before = {each: self._num_stale(each) for each in self._all.values()}
        yield
        for borrower, num_stale in before.items():
            link = borrower.link
            if not borrower.maps:
                borrower.leases = set(self._open_leases(borrower))
            elif link and link.maps and self._num_stale(borrower) > num_stale:
                self._send(borrower, link)

    def _send(self, borrower: Borrower, link: Link) -> None:
        link.num_fences += 1
        admission = self._admission
        # No epoch if the process has not mapped the memory of this one.
        epoch = admission.epoch if borrower.epoch == admission.epoch else 0
        live = tuple(sorted(admission.live))
        link.send(FenceSent(link.num_fences, epoch, admission.last_session_number, live))


def _past(borrower: Borrower, leases: Iterable[TableLease]) -> PastBorrower:
    sessions = sorted((lease.epoch, int(lease.session_number)) for lease in leases)
    return PastBorrower(borrower.pid, borrower.started_ticks, borrower.client_id, borrower.name, tuple(sessions))


def _check_newest(borrower: Borrower, link: Link) -> None:
    if borrower.link is not link:
        message = "the process has exited, or has a newer connection than this one"
        raise UnavailableError("CONNECTION_REPLACED", message, retry_seconds=1.0)


def _not_written(error: OSError) -> UnavailableError:
    message = f"the lender cannot write down which processes map the memory: {error.strerror}"
    return UnavailableError("NOT_WRITTEN", message, retry_seconds=1.0)
