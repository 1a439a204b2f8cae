"""The protocol of a session, without I/O: numbers its steps, encodes them and applies their results.

1. A step is collected from the requests as they are then. The service's knowledge of a request changes only when the
   result is applied. A refused step leaves the session's copy unchanged, as it leaves the server's state.
2. A step without an answer stays the next step to send: the same number gets the same answer again.
3. Allocations within a request's credit are answered here. Their sum is sent with the next operation on the request.
   Their requests may take more of it while a step that no scheduler waits for has no answer.
4. Once the server has reported the end of the session, every later step raises the same error and is not sent.
"""

from collections.abc import Sequence
from typing import Final

from kvpool.client.lease import LeaseTimer
from kvpool.client.request import Request
from kvpool.client.reserves import REPORT_STEPS, due, note_run_tokens, take_slots
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
from kvpool.core.steps.columns import LEAVING, MAX_CREDIT_ALLOCATIONS, TAKING, Operation, Outcome, Step, StepResult

_REFUSALS: Final = (InvalidArgumentError, NotFoundError, WrongStateError, ExhaustedError)
_OWN_REASONS: Final = frozenset(("CLOSED", "FORKED"))
"""Errors that the client raises itself. The service may have applied the step."""
_SHORT: Final = frozenset((Outcome.NO_BLOCKS, Outcome.OVER_QUOTA))
_CACHING: Final = frozenset((*TAKING, Operation.CACHE, Operation.RESERVE))


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
        is_in_background: Whether a step without an answer is one that no scheduler waits for.
    """

    def __init__(self, config: PoolConfig, reserve_tokens: int = 0) -> None:
        self._format = StepFormat.of(config)
        self._reserve_tokens = reserve_tokens
        self._filling = _CACHING | LEAVING if reserve_tokens else _CACHING
        """Operations that may cache blocks: with a reserve, one that frees a request caches what it has filled."""
        self._gives_back = False
        """Whether the next requests on credit give their reserves back: another session was refused blocks."""
        self._num_unreported = 0
        """Steps with allocations on credit since reserves were last looked at."""
        self._refused: StepBuilder | None = None
        """The last step, if it was refused blocks."""
        self._reader = ResultReader(config, self._format.spans, reserves=reserve_tokens > 0)
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
        self.is_in_background = False
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
        if self._over or (self._unanswered and not self.is_in_background):
            raise self._refusal()
        return StepBuilder(
            self._format, self._round_number, Step(0, executed_sequence, launched_sequence, admission_budget_tokens)
        )

    def decode_on_credit(
        self, requests: Sequence[Request], num_slots: int, executed_sequence: int, num_in_flight_tokens: Sequence[int]
    ) -> dict[int, list[list[int]]] | None:
        """Takes a slot for one more token of each request, if that needs no step now.

        Args:
            requests: The requests, each once.
            num_slots: Number of slots that each must hold: for its token, and for drafts.
            executed_sequence: See `Session.step`.
            num_in_flight_tokens: See `StepBuilder.decode`.

        Returns:
            The blocks of requests that got any, per group, by place. None, and nothing was changed, if a request holds
            too few slots, or the service needs a report.
        """
        step_format, is_looked_at = self._format, self._is_report_due
        if self._over or (self._unanswered and not self.is_in_background):
            return None
        if is_looked_at and (
            self._gives_back
            or self._is_awaited(executed_sequence)
            or due(requests, self._reserve_tokens, step_format.report_tokens)
        ):
            return None
        short = [i for i, each in enumerate(requests) if each.credit_tokens - each.num_computed_tokens < num_slots]
        for place in short:
            if requests[place].held_tokens - requests[place].num_computed_tokens < num_slots:
                return None
        new = {i: take_slots(requests[i], step_format.spans, num_slots, step_format.max_tokens) for i in short}
        if step_format.has_windows:
            note_run_tokens(requests, num_in_flight_tokens)
        for request in requests:
            request.num_computed_tokens += 1
        self._num_on_credit += len(requests)
        self._round_number += 1
        self._num_unreported = 0 if is_looked_at else self._num_unreported + 1
        return new

    @property
    def _is_report_due(self) -> bool:
        return not self._unanswered and (self._gives_back or self._num_unreported >= REPORT_STEPS - 1)

    def _is_awaited(self, executed_sequence: int) -> bool:
        """Whether others may wait for the report that the steps up to this one were executed."""
        return self._reported_sequence < min(executed_sequence, self._awaited_sequence)

    def answer_on_credit(self, builder: StepBuilder, lease_timer: LeaseTimer) -> bool:
        """Answers a step here, if it need not be sent. Returns whether it did. Adds the reports that are due before.

        Args:
            builder: The step.
            lease_timer: Knows whether the session was certainly open a moment ago. If not, the service must answer.

        Raises:
            KvpoolError: As `encode`.
        """
        if self._over or builder.round_number != self._round_number or (self._unanswered and not self.is_in_background):
            raise self._refusal()
        reports = not self._reserve_tokens
        if builder.on_credit and not reports:
            reports = self._is_report_due
            self._num_unreported = 0 if reports else self._num_unreported + 1
            if reports:
                builder.report(self._reserve_tokens, gives_back=self._gives_back)
                self._gives_back = False
        if builder.rows:
            return False
        executed = builder.step.executed_sequence
        if builder.on_credit and not lease_timer.is_fresh:
            return False
        if not self._unanswered:  # else a report has to wait
            if executed > self.sequence or (executed and not builder.on_credit):
                return False
            if reports and self._is_awaited(executed):
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
        if self._reserve_tokens:
            self.is_in_background = not builder.waits
        if self.is_in_background:
            self._num_on_credit = num_on_credit
            builder.take_credit()
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
        was_in_background, self.is_in_background, self._unanswered = self.is_in_background, False, None
        self._round_number += 1
        self.sequence, self.free_blocks = step.sequence, result.free_blocks
        self._num_on_credit = self._num_on_credit - step.num_credit_allocations if was_in_background else 0
        self._gives_back = self._gives_back or result.reserve_wanted
        self._refused = builder if self._reserve_tokens and not _SHORT.isdisjoint(result.outcomes) else None
        builder.take_credit()
        self._reported_sequence = max(self._reported_sequence, step.executed_sequence)
        if not self._filling.isdisjoint(step.operations):
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

    def new_retry(self) -> StepBuilder | None:
        """Asks again for what the last step was refused, if the session holds a reserve to give back before."""
        refused, self._refused = self._refused, None
        if refused is None:
            return None
        builder = self.new_step(0, refused.step.executed_sequence, refused.step.launched_sequence)
        return builder if builder.ask_again(refused, self._reader.holders) else None

    def check_settled(self) -> None:
        """Raises the error that ended the session, or WrongStateError if a step that was sent has no answer yet."""
        if self._over or self._unanswered:
            raise self._refusal()

    def unanswered(self) -> Step | None:
        """The step that was sent and has no answer."""
        return self._unanswered[0] if self._unanswered else None

    def fail(self, error: KvpoolError) -> None:
        """Handles the error of a step. A refusal changed nothing; after any other error it stays without an answer."""
        if is_refusal(error) and self._unanswered:
            self._unanswered[1].restore_reserves()
            self._unanswered, self.is_in_background = None, False

    def end(self, error: KvpoolError) -> None:
        """Ends the session, with the error that every later step raises."""
        self._over = error
        self._unanswered, self.is_in_background = None, False

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
