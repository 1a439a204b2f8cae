"""What a rank does on each word of the server: no thread, no socket, no clock, no tensor.

1. Every method returns its effects, in order; the caller carries them out.
2. Tensors outlive streams. A plan that asks for the same layout and no more blocks keeps them; what they hold is then
   worth nothing, as the new epoch says. For any other plan they are freed before new ones are allocated.
3. An epoch that began goes on until the server says otherwise. A broken stream alone ends none: no step but its own
   rank's writes its blocks.
4. Only the newest plan of the present stream is answered, and only once its tensors are there.
5. What can be mended by joining again is tried for ever; what the caller must mend ends the rank.
6. A plan is answered, and tensors are freed for it, when no step of an earlier epoch is in flight; a fence, when none
   that it keeps out is. Of two fences the newer is answered, and only on the stream that it came on.

Source: the conversation is that of proto/kvpool/v1/worker.proto.
"""

from collections.abc import Callable
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
from kvpool.core.ranks.messages import HeldTensors, PoolState, Registration
from kvpool.gpu_worker.fence import Fence
from kvpool.gpu_worker.words import (
    Allocate,
    Allocation,
    CloseStream,
    Effect,
    EpochBegan,
    EpochPassed,
    Failed,
    Fenced,
    FenceSet,
    Heard,
    Heartbeat,
    Initialized,
    JoinLater,
    Leave,
    OpenStream,
    Planned,
    Ready,
    Registered,
    Say,
    Status,
)
from kvpool.wire.errors import DeadlineError, ServerError

REGISTER_TIMEOUT_SECONDS: Final = 10.0
"""How long the first word of the server is waited for, the connection included."""
FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 3.0
_NO_USE_CODES: Final = ("UNIMPLEMENTED",)
"""Codes without an error of their own: the server is another, or of another release."""


class Phase(Enum):
    """Where a rank stands."""

    JOINING = "joining"
    """Its stream is being opened; the server has not answered."""
    REGISTERED = "registered"
    """It waits for the other ranks, and then its plan."""
    ALLOCATING = "allocating"
    ALLOCATED = "allocated"
    """It waits for the other ranks to allocate."""
    READY = "ready"
    REJOINING = "rejoining"
    """It has no stream, and will try again."""
    FAILED = "failed"
    LEFT = "left"


class RankProtocol:
    """One rank's side of the conversation.

    Attributes:
        phase: Where the rank stands.
        ready: The epoch that goes on; None if there is none.
        status: What the server said last of the pool.
        held: The tensors that there are; None while there are none, or while others are being allocated.
        num_joins: Times that the server took the rank in.
        num_answers: Heartbeats that it answered.
        answered_seconds: When it answered the last; None before the first.
    """

    def __init__(self, registration: Registration, jitter: Callable[[], float], fence: Fence) -> None:
        """Starts without a stream.

        Args:
            registration: What the rank says of itself; what it holds is put in here.
            jitter: Draws from [0, 1), so that ranks do not all come back at once.
            fence: Admits the rank's steps; it is set here, and opened by who makes the views. When it falls quiet,
                `steps_ended` is to be called.
        """
        self.phase = Phase.REJOINING
        self.ready: Ready | None = None
        self.status: Status | None = None
        self.held: Allocation | None = None
        self.num_joins = 0
        self.num_answers = 0
        self.answered_seconds: float | None = None
        self._registration = registration
        self._jitter = jitter
        self._fence = fence
        self._unanswered_fence = 0
        self._held_epoch = 0
        self._last_epoch = 0
        self._planned: Planned | None = None
        """The newest plan of this stream, until its epoch begins."""
        self._is_allocating = False
        self._timing: Registered | None = None
        self._last_seen_seconds = 0.0
        self._heartbeat_due_seconds = 0.0
        self._join_due_seconds = 0.0
        self._sequence = 0
        self._num_failures = 0

    @property
    def is_over(self) -> bool:
        """Whether the rank has left or failed."""
        return self.phase in (Phase.FAILED, Phase.LEFT)

    @property
    def next_due_seconds(self) -> float:
        """When `tick` is due next, as things stand."""
        if self.is_over:
            return float("inf")
        if self.phase is Phase.REJOINING:
            return self._join_due_seconds
        if self._timing is None:
            return self._silent_at_seconds
        return min(self._heartbeat_due_seconds, self._silent_at_seconds)

    @property
    def _silent_at_seconds(self) -> float:
        patience = self._timing.heartbeat_timeout_seconds if self._timing else REGISTER_TIMEOUT_SECONDS
        return self._last_seen_seconds + patience

    def tick(self, now_seconds: float) -> list[Effect]:
        """Does what is due: joins, sends a heartbeat, or gives up a stream on which nothing comes."""
        if self.is_over or now_seconds < self.next_due_seconds:
            return []
        if self.phase is Phase.REJOINING:
            return self._join(now_seconds)
        if now_seconds >= self._silent_at_seconds:
            silent_seconds = now_seconds - self._last_seen_seconds
            error = DeadlineError("SERVER_SILENT", f"nothing came from the server for {silent_seconds:.1f} s")
            return [CloseStream(), *self.stream_ended(error, now_seconds)]
        return self._beat(now_seconds)

    def heard(self, message: Heard, now_seconds: float) -> list[Effect]:
        """Takes in what the server says."""
        self._last_seen_seconds = now_seconds
        match message:
            case Registered():
                self._timing = message
                self.num_joins += 1
                if self.phase is Phase.JOINING:
                    self.phase = Phase.REGISTERED
                return self._beat(now_seconds)
            case Planned():
                self._planned = message
                self._last_epoch = max(self._last_epoch, message.epoch)
                return [*self._pass_epoch(), *self._answer_plan()]
            case Ready():
                return self._begin_epoch(message, now_seconds)
            case Status():
                return self._note_status(message, now_seconds)
            case FenceSet():
                return self._narrow(message)
            case _:
                assert_never(message)

    def allocated(self, planned: Planned, allocation: Allocation) -> list[Effect]:
        """Notes what came of an `Allocate`."""
        self._is_allocating = False
        self.held, self._held_epoch = allocation, planned.epoch
        if self._planned is planned:
            return self._initialized(planned)
        return self._answer_plan()

    def steps_ended(self) -> list[Effect]:
        """Notes that no step is in flight any more which must not run: answers what waited for that."""
        waits = self.phase is Phase.ALLOCATING and not self._is_allocating
        return [*(self._answer_plan() if waits else ()), *self._answer_fence()]

    def stream_ended(self, error: KvpoolError, now_seconds: float) -> list[Effect]:
        """Notes that the stream ended, and why."""
        if self._is_fatal(error):
            return self._over(Phase.FAILED, Failed(error))
        pause_seconds = error.retry_seconds
        if pause_seconds is None:
            pause_seconds = min(FIRST_PAUSE_SECONDS * 2 ** min(self._num_failures, 16), LONGEST_PAUSE_SECONDS)
        pause_seconds *= 1 + self._jitter()
        self._num_failures += 1
        self._planned = None
        self._unanswered_fence = 0
        self.phase = Phase.REJOINING
        self._join_due_seconds = now_seconds + pause_seconds
        return [JoinLater(error, pause_seconds)]

    def fail(self, error: Exception) -> list[Effect]:
        """Ends the rank for a reason of its own, such as memory that does not even hold two blocks."""
        if self.is_over:
            return []
        return self._over(Phase.FAILED, *self._goodbye(), Failed(error))

    def leave(self) -> list[Effect]:
        """Ends the rank as its process wants."""
        if self.is_over:
            return []
        return self._over(Phase.LEFT, *self._goodbye())

    def _goodbye(self) -> list[Effect]:
        return [] if self.phase is Phase.REJOINING else [Say(Leave())]

    def _over(self, phase: Phase, *effects: Effect) -> list[Effect]:
        self.phase = phase
        self._planned = None
        return [*self._pass_epoch(), *effects]

    def _join(self, now_seconds: float) -> list[Effect]:
        self.phase = Phase.JOINING
        self._timing = None
        self._last_seen_seconds = now_seconds
        self._sequence = 0
        held = HeldTensors(self._held_epoch, self.held.num_blocks) if self.held else None
        return [OpenStream(replace(self._registration, held=held, last_epoch=self._last_epoch))]

    def _beat(self, now_seconds: float) -> list[Effect]:
        if self._timing is None:
            return []
        self._sequence += 1
        self._heartbeat_due_seconds = now_seconds + self._timing.heartbeat_seconds
        return [Say(Heartbeat(self._sequence))]

    def _answer_plan(self) -> list[Effect]:
        planned = self._planned
        if planned is None:
            return []
        self.phase = Phase.ALLOCATING
        if self._is_allocating or not self._fence.is_within_credit:
            return []
        if self.held and self.held.fits(planned.config):
            self._held_epoch = planned.epoch
            return self._initialized(planned)
        self.held = None
        self._is_allocating = True
        return [Allocate(planned)]

    def _initialized(self, planned: Planned) -> list[Effect]:
        if self.held is None:
            return []
        self.phase = Phase.ALLOCATED
        return [Say(Initialized(planned.epoch, self.held))]

    def _begin_epoch(self, ready: Ready, now_seconds: float) -> list[Effect]:
        held_blocks = self.held.num_blocks if self.held and self._held_epoch == ready.epoch else 0
        if ready.num_blocks > held_blocks:
            message = f"ready with {ready.num_blocks} blocks in epoch {ready.epoch}, for which {held_blocks} are held"
            return [CloseStream(), *self.stream_ended(ServerError("NOT_AS_PLANNED", message), now_seconds)]
        self.phase = Phase.READY
        self.status = Status(PoolState.READY, ready.epoch, ())
        self._planned = None
        if ready == self.ready:
            return []
        passed = self._pass_epoch()
        self.ready = ready
        self._fence.begin(ready.epoch)
        return [*passed, EpochBegan(ready)]

    def _note_status(self, status: Status, now_seconds: float) -> list[Effect]:
        self.status = status
        if status.heartbeat_sequence:
            self.num_answers += 1
            self.answered_seconds = now_seconds
            self._num_failures = 0  # registering alone is no sign that it goes well
        if self.ready is None or status.epoch <= self.ready.epoch:
            return []
        if self.phase is Phase.READY:
            self.phase = Phase.REGISTERED
        return self._pass_epoch()

    def _narrow(self, fence: FenceSet) -> list[Effect]:
        if self.ready is None or fence.epoch != self.ready.epoch:
            return []
        self._fence.narrow(fence.last_session_number, fence.live_session_numbers)
        self._unanswered_fence = fence.fence_sequence
        return self._answer_fence()

    def _answer_fence(self) -> list[Effect]:
        sequence = self._unanswered_fence
        if not sequence or not self._fence.is_within_credit:
            return []
        self._unanswered_fence = 0
        return [Say(Fenced(sequence))]

    def _pass_epoch(self) -> list[Effect]:
        passed, self.ready = self.ready, None
        self._fence.end()
        self._unanswered_fence = 0
        return [EpochPassed(passed.epoch)] if passed else []

    def _is_fatal(self, error: KvpoolError) -> bool:
        if isinstance(error, ExhaustedError):  # a registration too large is so the next time; a slow reader is not
            return error.retry_seconds is None and self._timing is None
        if isinstance(error, UnauthenticatedError | DeniedError):  # of a rank that was let in, the token may be renewed
            return self._timing is None
        if isinstance(error, InvalidArgumentError | WrongStateError | NotFoundError):
            return True
        return isinstance(error, ServerError) and error.reason in _NO_USE_CODES
