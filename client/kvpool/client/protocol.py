"""The protocol of a session, without I/O: numbers its steps, encodes them and applies their results.

1. A step is collected from the requests as they are then. The service's knowledge of a request changes only when the
   result is applied. A refused step leaves the session's copy unchanged, as it leaves the server's state.
2. A step without an answer stays the next step to send: the same number gets the same answer again.
3. Allocations within a request's credit are answered here. Their sum is sent with the next operation on the request.
4. Once the server has reported the end of the session, every later step raises the same error and is not sent.
"""

from typing import Final

from kvpool.client.result_reader import ResultReader
from kvpool.client.step_builder import StepBuilder, StepFormat
from kvpool.core.errors import (
    AbortedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    WrongStateError,
)
from kvpool.core.ids import BlockId, GroupId, StepNumber
from kvpool.core.sessions.request import BlockCopy
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import LEAVING, MAX_CREDIT_ALLOCATIONS, Operation, Step, StepResult

_REFUSALS: Final = (InvalidArgumentError, NotFoundError, WrongStateError, ExhaustedError)
_OWN_REASONS: Final = frozenset(("CLOSED", "FORKED"))
"""Errors that the client raises itself. The service may have applied the step."""
_CACHING: Final = frozenset((Operation.ADMIT, Operation.ALLOCATE, Operation.CACHE))


def is_refusal(error: KvpoolError) -> bool:
    """Whether a step that failed with this error has certainly changed nothing.

    A server that sends a retry time may not have looked whether an earlier attempt was applied.
    """
    return isinstance(error, _REFUSALS) and error.retry_seconds is None and error.reason not in _OWN_REASONS


def ends_session(error: KvpoolError) -> bool:
    """Whether the session is over: every later call on it would fail too."""
    return isinstance(error, AbortedError) or error.reason == "SESSION_NOT_FOUND"


class SessionProtocol:
    """State of a session's protocol.

    Attributes:
        sequence: Number of the last step that was answered.
        free_blocks: Blocks that the session could be given when that step was answered; 0 before the first.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._format = StepFormat.of(config)
        self._reader = ResultReader(config)
        self._num_on_credit = 0
        """Allocations on credit since the last step that was sent."""
        self._awaited_sequence = 0
        """The last step whose execution others may wait for: it cached blocks, or ran while some were freed."""
        self._reported_sequence = 0
        """The last step that was reported as executed."""
        self._unanswered: tuple[Step, StepBuilder] | None = None
        self._round_number = 0
        """Number of steps that were answered, here or by the service."""
        self._over: KvpoolError | None = None
        self.sequence = 0
        self.free_blocks = 0
        self.copies: list[BlockCopy] = []

    @property
    def is_over(self) -> bool:
        """Whether the session has ended."""
        return self._over is not None

    def new_step(self, admission_budget_tokens: int, executed_sequence: int, launched_sequence: int) -> StepBuilder:
        """Starts a step. It can be sent until another one is answered, as its columns depend on what was answered.

        Raises:
            KvpoolError: As `check_settled`.
        """
        if self._over or self._unanswered:
            raise self._refusal()
        return StepBuilder(
            self._format, self._round_number, admission_budget_tokens, executed_sequence, launched_sequence
        )

    def answer_on_credit(self, builder: StepBuilder, *, is_fresh: bool) -> bool:
        """Answers a step without rows here, if it need not be sent. Returns whether it did.

        Args:
            builder: The step.
            is_fresh: Whether the session was certainly open a moment ago. If not, only the service can answer.

        Raises:
            KvpoolError: As `encode`.
        """
        if self._over or self._unanswered or builder.round_number != self._round_number:
            raise self._refusal()
        executed = builder.step.executed_sequence
        if executed > self.sequence or (executed and not builder.on_credit):
            return False
        if builder.on_credit and not is_fresh:
            return False
        if self._reported_sequence < min(executed, self._awaited_sequence):
            return False
        self._round_number += 1
        builder.take_credit()
        self._num_on_credit += len(builder.on_credit)
        return True

    def encode(self, builder: StepBuilder) -> Step:
        """Makes the next step. `apply_result` or `fail` must follow before the step after it.

        Raises:
            WrongStateError: Another step was answered since this one was started.
            KvpoolError: As `check_settled`.
        """
        if self._over or self._unanswered or builder.round_number != self._round_number:
            raise self._refusal()
        num_on_credit = min(self._num_on_credit + len(builder.on_credit), MAX_CREDIT_ALLOCATIONS)
        step = builder.complete(self.sequence + 1, num_on_credit)
        builder.is_sent = True
        self._unanswered = (step, builder)
        return step

    def apply_result(self, result: StepResult) -> None:
        """Applies the result of the step without an answer: fills its answers and the requests' tables.

        Raises:
            ServerError: The result is malformed. Nothing of it is applied, and the step stays without an answer.
        """
        if self._unanswered is None:
            raise WrongStateError("NO_STEP", "no step waits for a result")
        step, builder = self._unanswered
        self._reader.check_shape(step, result)
        if result.copied_block_ids:
            self._reader.check_copies(result.copied_block_ids)
        self._unanswered = None
        self._round_number += 1
        self.sequence, self.free_blocks = step.sequence, result.free_blocks
        self._num_on_credit = 0
        builder.take_credit()
        self._reported_sequence = max(self._reported_sequence, step.executed_sequence)
        if not _CACHING.isdisjoint(step.operations):
            self._awaited_sequence = step.sequence
        elif step.launched_sequence > step.executed_sequence and not LEAVING.isdisjoint(step.operations):
            self._awaited_sequence = max(self._awaited_sequence, step.launched_sequence)
        self._reader.apply(step, builder, result)
        if result.copied_block_ids:
            copied = iter(result.copied_block_ids)
            self.copies += [
                BlockCopy(GroupId(group_id), BlockId(source), BlockId(target), StepNumber(step.sequence))
                for group_id, source, target in zip(copied, copied, copied, strict=True)
            ]

    def check_settled(self) -> None:
        """Raises the error that ended the session, or WrongStateError if a step that was sent has no answer yet."""
        if self._over or self._unanswered:
            raise self._refusal()

    def unanswered(self) -> Step | None:
        """The step that was sent and has no answer."""
        return self._unanswered[0] if self._unanswered else None

    def fail(self, error: KvpoolError) -> None:
        """Handles the error of a step. A refusal changed nothing; after any other error it stays without an answer."""
        if is_refusal(error):
            self._unanswered = None

    def end(self, error: KvpoolError) -> None:
        """Ends the session, with the error that every later step raises."""
        self._over = error
        self._unanswered = None

    def executed(self, executed_sequence: int) -> None:
        """Records that the steps up to this one were reported as executed."""
        self._reported_sequence = max(self._reported_sequence, executed_sequence)

    def _refusal(self) -> KvpoolError:
        """Makes the error of a step that cannot be the next one."""
        if self._over:
            return self._over.with_traceback(None)
        if self._unanswered:
            return WrongStateError("UNSETTLED", "the step before has no answer yet: settle it, or close the session")
        return WrongStateError("STEP_OUTDATED", "another step was made while this one was collected: collect it again")
