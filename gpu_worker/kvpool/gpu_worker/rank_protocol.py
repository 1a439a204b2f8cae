"""The protocol of a rank: its reaction to each message of the server. No thread, socket, clock or tensor.

1. Every method returns its effects in order. The caller carries them out.
2. Tensors outlive streams. A plan with the same layout and no more blocks keeps the tensors; the new epoch invalidates
   their contents. For any other plan they are freed before new ones are allocated.
3. An epoch continues until the server ends it. A broken stream does not end it, because only steps of this rank write
   its blocks.
4. Only the newest plan of the current stream is answered, and only after its tensors are allocated.
5. Errors that joining again can resolve are retried indefinitely, at the server that a search for the primary chooses.
   Errors that the caller must resolve end the rank.
6. A plan is answered, and tensors are freed for it, when no step of an earlier epoch is in flight. The newest fence of
   the stream is answered at once, with the sessions of which steps that it excludes are in flight, and again whenever
   these become fewer. While they are more than an answer can name, there is none.

Source: proto/kvpool/v1/worker.proto defines the messages.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from enum import Enum
from typing import Final, assert_never

from kvpool.core.errors import (
    DeniedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    UnauthenticatedError,
    WrongStateError,
)
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import (
    MAX_NAMED_SESSIONS,
    FenceSet,
    HeldTensors,
    Planned,
    PoolState,
    PoolStatus,
    Ready,
    Registered,
    Registration,
    ServerMessage,
)
from kvpool.gpu_worker.rank_effects import (
    Allocate,
    Allocation,
    Effect,
    EpochBegan,
    EpochPassed,
    Failed,
    Fenced,
    Heartbeat,
    Initialized,
    JoinLater,
    Leave,
    OpenStream,
    Send,
    SessionsGone,
)
from kvpool.lending.borrower_registry import BorrowerRegistry
from kvpool.lending.fence import Fence
from kvpool.wire.backoff import Backoff
from kvpool.wire.errors import DeadlineError, ServerError
from kvpool.wire.seeds import AddressBook, PrimarySearch

REGISTER_TIMEOUT_SECONDS: Final = 10.0
"""Time to connect and to receive the first message of the server."""
_NEVER: Final = float("inf")
_FATAL_CODES: Final = ("UNIMPLEMENTED",)
"""Codes without an error class: the address is another service, or another release of the server."""


class Phase(Enum):
    """The phase of a rank."""

    IDLE = "idle"
    """The rank waits for an engine that declares the memory."""
    JOINING = "joining"
    """The stream is being opened; the server has not answered."""
    REGISTERED = "registered"
    """The rank waits for the other ranks, then for its plan."""
    ALLOCATING = "allocating"
    ALLOCATED = "allocated"
    """The rank waits for the other ranks to allocate."""
    READY = "ready"
    REJOINING = "rejoining"
    """The rank has no stream and will join again."""
    FAILED = "failed"
    LEFT = "left"
    ABANDONED = "abandoned"
    """The process ends, and a later one continues with the same memory."""


RankFence = Fence | BorrowerRegistry
"""Admits the steps of a rank: those of this process, or of processes that map its memory."""


class RankProtocol:
    """The rank's side of a Join stream.

    Attributes:
        phase: The phase of the rank.
        ready: The current epoch; None if there is none.
        status: The newest state of the pool that the server reported.
        held: The tensors that the rank holds; None before the first allocation and while others are being allocated.
        num_joins: Number of streams on which the server accepted the rank.
        num_answers: Number of heartbeats that the server answered.
        answered_seconds: Time of the last answered heartbeat; None before the first.
    """

    def __init__(
        self,
        registration: Registration,
        seeds: tuple[str, ...],
        fence: RankFence,
        held: Allocation | None = None,
        draw: Callable[[], float] | None = None,
    ) -> None:
        """Starts without a stream.

        Args:
            registration: The rank's registration; the protocol adds the tensors that are held.
            seeds: Addresses of the server, or of a primary and its standbys.
            fence: Admits the rank's steps. The protocol sets it; the caller opens it after it has made the views, and
                calls `steps_ended` when the fence reports the end of stale steps.
            held: The tensors of an earlier process, of the epoch in `registration.held`; None if there are none.
            draw: See `Backoff`.
        """
        self.phase = Phase.REJOINING
        self.ready: Ready | None = None
        self.status: PoolStatus | None = None
        self.held = held
        self.num_joins = 0
        self.num_answers = 0
        self.answered_seconds: float | None = None
        self._registration = registration
        self._servers = AddressBook(seeds)
        self._search = PrimarySearch(self._servers)
        self._backoff = Backoff(0.1, 3.0, draw=draw)
        self._fence = fence
        self._fence_sequence = 0
        """The newest fence of this stream; 0 for none."""
        self._pending: tuple[SessionNumber, ...] | None = None
        """The sessions in the last answer to it; None before the first."""
        self._held_epoch = registration.held.epoch if registration.held else 0
        self._last_epoch = registration.last_epoch
        self._awaits_fence = False
        """Whether the epoch began in an earlier process: which of its sessions have ended is not known yet."""
        self._gone: dict[TableLease, float] = {}
        """Sessions whose processes have exited, until a fence shows that they have ended; each with the first heartbeat
        after its last report on this stream."""
        self._last_session_number = 0
        """The newest session number that a fence of this epoch has named."""
        self._planned: Planned | None = None
        """The newest plan of this stream, until its epoch begins."""
        self._is_allocating = False
        self._timing: Registered | None = None
        self._last_seen_seconds = 0.0
        self._heartbeat_due_seconds = 0.0
        self._join_due_seconds = 0.0
        self._sequence = 0

    @property
    def target(self) -> str:
        """Address of the server of the next stream."""
        return self._servers.target

    @property
    def is_over(self) -> bool:
        """Whether the rank has left, failed or was abandoned."""
        return self.phase in (Phase.FAILED, Phase.LEFT, Phase.ABANDONED)

    @property
    def next_due_seconds(self) -> float:
        """Time of the next `tick` in the current state."""
        if self.is_over:
            return float("inf")
        if self.phase is Phase.REJOINING:
            return self._join_due_seconds
        if self._timing is None:
            return self._silent_at_seconds
        return min(self._heartbeat_due_seconds, self._silent_at_seconds)

    @property
    def _silent_at_seconds(self) -> float:
        timeout_seconds = self._timing.heartbeat_timeout_seconds if self._timing else REGISTER_TIMEOUT_SECONDS
        return self._last_seen_seconds + timeout_seconds

    def tick(self, now_seconds: float) -> list[Effect]:
        """Joins, sends a heartbeat, or gives up a silent stream, if that is due."""
        if self.is_over or now_seconds < self.next_due_seconds:
            return []
        if self.phase is Phase.REJOINING:
            return self._join(now_seconds)
        if now_seconds >= self._silent_at_seconds:
            silent_seconds = now_seconds - self._last_seen_seconds
            error = DeadlineError("SERVER_SILENT", f"no message from the server for {silent_seconds:.1f} s")
            return self.stream_ended(error, now_seconds)
        return self._heartbeat(now_seconds)

    def received(self, message: ServerMessage, now_seconds: float) -> list[Effect]:
        """Handles a message of the server."""
        self._last_seen_seconds = now_seconds
        match message:
            case Registered():
                self._timing = message
                self.num_joins += 1
                if self.phase is Phase.JOINING:
                    self.phase = Phase.REGISTERED
                return self._heartbeat(now_seconds)
            case Planned():
                self._planned = message
                self._last_epoch = max(self._last_epoch, message.epoch)
                return [*self._pass_epoch(), *self._answer_plan()]
            case Ready():
                return self._begin_epoch(message, now_seconds)
            case PoolStatus():
                return self._update_status(message, now_seconds)
            case FenceSet():
                return self._narrow(message)
            case _:
                assert_never(message)

    def allocated(self, planned: Planned, allocation: Allocation) -> list[Effect]:
        """Handles the result of an `Allocate` effect."""
        self._is_allocating = False
        self.held, self._held_epoch = allocation, planned.epoch
        if self._planned is planned:
            return self._initialized(planned, allocation)
        return self._answer_plan()

    def steps_ended(self) -> list[Effect]:
        """Answers the plan and the fence that wait for steps in flight, now that some have ended."""
        waits = self.phase is Phase.ALLOCATING and not self._is_allocating
        return [*(self._answer_plan() if waits else ()), *self._answer_fence()]

    def stream_ended(self, error: KvpoolError, now_seconds: float) -> list[Effect]:
        """Handles an error that ends the stream. The server or the connection may have ended it already."""
        if self._is_fatal(error):
            return self._end(Phase.FAILED, Failed(error))
        routed_seconds = self._search.failed(self.target, error)
        pause_seconds = self._backoff.next(error.retry_seconds if routed_seconds is None else routed_seconds)
        self._planned = None
        self._fence_sequence = 0
        self.phase = Phase.REJOINING
        self._join_due_seconds = now_seconds + pause_seconds
        return [JoinLater(error, pause_seconds)]

    def fail(self, error: Exception) -> list[Effect]:
        """Ends the rank with a local error, such as memory that cannot hold two blocks."""
        if self.is_over:
            return []
        return self._end(Phase.FAILED, *self._leave_message(), Failed(error))

    def leave(self) -> list[Effect]:
        """Ends the rank at the request of its process."""
        if self.is_over:
            return []
        return self._end(Phase.LEFT, *self._leave_message())

    def abandon(self) -> list[Effect]:
        """Ends the rank without a message, so that a later process can come back with the same tensors."""
        return [] if self.is_over else self._end(Phase.ABANDONED)

    def sessions_gone(self, leases: Collection[TableLease]) -> list[Effect]:
        """Reports sessions whose processes have exited; again with each fence that lists them as live.

        A session that no fence has named by the time the server has read the report does not exist, and is forgotten:
        another process may open one with this number.
        """
        self._gone.update(dict.fromkeys(leases, _NEVER))
        return self._report_gone(leases) if self._timing else []

    def _report_gone(self, leases: Collection[TableLease]) -> list[Effect]:
        """Reports those of the current epoch; session numbers may repeat in others."""
        epoch = self.ready.epoch if self.ready else 0
        reported = [lease for lease in leases if lease.epoch == epoch]
        self._gone.update(dict.fromkeys(reported, self._sequence + 1))
        numbers = tuple(sorted(lease.session_number for lease in reported))
        starts = range(0, len(numbers), MAX_NAMED_SESSIONS)
        return [Send(SessionsGone(numbers[start : start + MAX_NAMED_SESSIONS])) for start in starts]

    def _leave_message(self) -> list[Effect]:
        return [] if self.phase is Phase.REJOINING else [Send(Leave())]

    def _end(self, phase: Phase, *effects: Effect) -> list[Effect]:
        self.phase = phase
        self._planned = None
        return [*self._pass_epoch(), *effects]

    def _join(self, now_seconds: float) -> list[Effect]:
        self.phase = Phase.JOINING
        self._timing = None
        self._last_seen_seconds = now_seconds
        self._sequence = 0
        self._gone = dict.fromkeys(self._gone, _NEVER)
        held = HeldTensors(self._held_epoch, self.held.num_blocks) if self.held else None
        return [OpenStream(replace(self._registration, held=held, last_epoch=self._last_epoch))]

    def _heartbeat(self, now_seconds: float) -> list[Effect]:
        if self._timing is None:
            return []
        self._sequence += 1
        self._heartbeat_due_seconds = now_seconds + self._timing.heartbeat_seconds
        return [Send(Heartbeat(self._sequence, self._fence.mapping_processes))]

    def _answer_plan(self) -> list[Effect]:
        planned = self._planned
        if planned is None:
            return []
        self.phase = Phase.ALLOCATING
        if self._is_allocating or not self._fence.is_drained:
            return []
        if self.held and self.held.fits(planned.config):
            self._held_epoch = planned.epoch
            return self._initialized(planned, self.held)
        self.held = None
        self._is_allocating = True
        return [Allocate(planned)]

    def _initialized(self, planned: Planned, held: Allocation) -> list[Effect]:
        self.phase = Phase.ALLOCATED
        return [Send(Initialized(planned.epoch, held))]

    def _begin_epoch(self, ready: Ready, now_seconds: float) -> list[Effect]:
        held_blocks = self.held.num_blocks if self.held and self._held_epoch == ready.epoch else 0
        for where, count, held_count in (
            ("", ready.num_blocks, held_blocks),
            (" in host memory", ready.num_host_blocks, self._registration.num_host_blocks),
        ):
            if count > held_count:
                message = f"ready with {count} blocks{where} in epoch {ready.epoch}; the rank holds {held_count}"
                return self.stream_ended(ServerError("NOT_AS_PLANNED", message), now_seconds)
        self.phase = Phase.READY
        self.status = PoolStatus(PoolState.READY, ready.epoch, ())
        self._planned = None
        if ready == self.ready:
            return []
        passed = self._pass_epoch() if self.ready else []  # an epoch of an earlier process continues
        self.ready = ready
        self._fence.begin(ready.epoch)
        held = self._registration.held
        self._awaits_fence = held is not None and held.epoch == ready.epoch
        return passed if self._awaits_fence else [*passed, EpochBegan(ready)]

    def _update_status(self, status: PoolStatus, now_seconds: float) -> list[Effect]:
        self.status = status
        if status.heartbeat_sequence:
            self.num_answers += 1
            self.answered_seconds = now_seconds
            self._search = PrimarySearch(self._servers)
            self._backoff.reset()  # a registration alone does not show that the server works
            self._gone = {
                lease: heartbeat
                for lease, heartbeat in self._gone.items()
                if heartbeat > status.heartbeat_sequence or lease.session_number <= self._last_session_number
            }
        if self.ready is None or status.epoch <= self.ready.epoch:
            return []
        if self.phase is Phase.READY:
            self.phase = Phase.REGISTERED
        return self._pass_epoch()

    def _narrow(self, fence: FenceSet) -> list[Effect]:
        if self.ready is None or fence.epoch != self.ready.epoch:
            return []
        self._fence.kill([TableLease(fence.epoch, SessionNumber(number)) for number in fence.killed_session_numbers])
        self._fence.narrow(fence.last_session_number, fence.live_session_numbers)
        self._fence_sequence, self._pending = fence.fence_sequence, None
        begun = [EpochBegan(self.ready)] if self._awaits_fence else []
        self._awaits_fence = False
        self._last_session_number = fence.last_session_number
        self._gone = {
            lease: heartbeat
            for lease, heartbeat in self._gone.items()
            if lease.session_number > fence.last_session_number or lease.session_number in fence.live_session_numbers
        }
        return [*begun, *self._report_gone(tuple(self._gone)), *self._answer_fence()]

    def _answer_fence(self) -> list[Effect]:
        pending = self._fence.pending
        if not self._fence_sequence or pending == self._pending or len(pending) > MAX_NAMED_SESSIONS:
            return []
        self._pending = pending
        return [Send(Fenced(self._fence_sequence, pending))]

    def _pass_epoch(self) -> list[Effect]:
        passed, self.ready = self.ready, None
        self._last_session_number = 0
        self._fence.end()
        self._fence_sequence = 0
        return [EpochPassed(passed.epoch)] if passed else []

    def _is_fatal(self, error: KvpoolError) -> bool:
        if isinstance(error, ExhaustedError):  # fatal if the registration is too large; a slow reader can join again
            return error.retry_seconds is None and self._timing is None
        if isinstance(error, UnauthenticatedError | DeniedError):  # the token of a registered rank may be renewed
            return self._timing is None
        if isinstance(error, InvalidArgumentError | WrongStateError | NotFoundError):
            return True
        return isinstance(error, ServerError) and error.reason in _FATAL_CODES
