"""Builds steps and reads their results, without I/O: what sync and asyncio sessions share.

1. A step is built from what requests are when it is sent; nothing counts as sent until its result is there. A step
   that is refused leaves the session's view as it was, as it leaves the server's.
2. A step without an answer stays the next one to be sent: the same number gets the same answer again.
3. What requests have quiet room for is answered here, and the sum is sent with the next operation on the request.
4. A session that the server has told to be over stays so: every later step is told the same, unsent.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from kvpool.client.check_result import check_result
from kvpool.client.deferred_caching import DeferredCaching
from kvpool.client.option_columns import complete_options, put_options
from kvpool.client.request import Request, hash_filled
from kvpool.client.step_builder import DecodeRow, Row, StepBuilder
from kvpool.core.blocks.credit import Credit
from kvpool.core.errors import (
    AbortedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    WrongStateError,
)
from kvpool.core.ids import NULL_BLOCK, GroupId
from kvpool.core.specs.kinds import MambaSpec
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS
from kvpool.core.steps.columns import MAX_CREDIT_ALLOCATIONS, Operation, Outcome, Step, StepResult

_REFUSALS: Final = (InvalidArgumentError, NotFoundError, WrongStateError, ExhaustedError)
_DECLARING: Final = frozenset(
    (
        Operation.LOOKUP,
        Operation.LOOKUP_UNCOUNTED,
        Operation.LOOKUP_COUNTED_ON_ADMIT,
        Operation.ADMIT,
        Operation.ALLOCATE,
    )
)
_CACHING: Final = frozenset((Operation.ADMIT, Operation.ALLOCATE, Operation.CACHE))
_OFTEN_EMPTY: Final = (
    "num_taken_tokens",
    "num_rejected_tokens",
    "num_lookahead_tokens",
    "num_encoder_tokens",
    "delay_cache_blocks",
)
_SKIPPING: Final = frozenset((Outcome.OK, Outcome.NO_BLOCKS, Outcome.OVER_QUOTA))
"""Outcomes of ALLOCATE before which blocks that slid out of a window were freed."""


def _is_refusal(error: KvpoolError) -> bool:
    """Whether a step that ended so is known to have changed nothing.

    A server that says when to come back may not have looked whether the step was applied when it was sent before.
    """
    return isinstance(error, _REFUSALS) and error.retry_seconds is None


def ends_session(error: KvpoolError) -> bool:
    """Whether a session that was answered so is over: nothing of it will be answered otherwise."""
    return isinstance(error, AbortedError) or error.reason == "SESSION_NOT_FOUND"


class SessionProtocol:
    """A session's numbers: builds its steps, reads their results."""

    def __init__(self, config: PoolConfig, sequence: int = 0) -> None:
        self._num_groups = len(config.groups)
        self._bounds = (len(config.groups), config.num_blocks, config.max_model_len)
        self._sends_tokens = config.makes_events
        self._hash_block_size = config.hash_block_size if config.enable_caching else 0
        self._rooms = [Credit.for_group(config, GroupId(i)) for i in range(len(config.groups))]
        self._windowed = [(i, room) for i, room in enumerate(self._rooms) if room.skips]
        # Of a step that overwrites a state, whoever resumes the session must be able to tell that it may have run.
        has_state = any(isinstance(room.spec, MambaSpec) for room in self._rooms)
        self._max_credit_tokens = 0 if has_state else config.max_model_len
        self._num_on_credit = 0  # since the last step
        self._deferred = DeferredCaching(config)
        self._caching_sequence = sequence  # of the last step that may have cached or filled blocks
        self._told_sequence = 0  # of the last that was said to have run
        self._unanswered: tuple[Step, StepBuilder] | None = None
        self._is_telling = False
        self._over: KvpoolError | None = None
        self.sequence = sequence
        self.free_blocks = 0

    def must_send(self, builder: StepBuilder, *, is_fresh: bool) -> bool:
        """Whether the service has to be told of a step now; if not, it is answered, and counted.

        Args:
            builder: The step.
            is_fresh: Whether the session was there a moment ago; if that is not known, only the service can answer.

        Raises:
            KvpoolError: As `check_settled`.
        """
        self.check_settled()
        builder.check_credit()
        executed = builder.executed_sequence
        if builder.rows or executed > self.sequence or (executed and not builder.quiet):
            return True
        if builder.quiet and not is_fresh:
            return True
        # Others may wait for what was cached; or filled, and was said to have run before it could be told.
        if self._told_sequence < min(executed, self._caching_sequence) or self.must_tell(executed):
            return True
        builder.settle_credit()
        self._num_on_credit += len(builder.quiet)
        return False

    def build(self, builder: StepBuilder) -> Step:
        """Makes the next step; `finish` must follow before the one after it, or `fail` with what settles it.

        Raises:
            KvpoolError: As `check_settled`.
        """
        self.check_settled()
        self._is_telling = not builder.rows and not builder.quiet and bool(self._deferred.untold)
        self._deferred.leave_out(builder)
        builder.rows[:0] = self._deferred.rows(builder)
        step = Step(
            self.sequence + 1,
            executed_sequence=builder.executed_sequence,
            launched_sequence=builder.launched_sequence,
            admission_budget_tokens=builder.admission_budget_tokens,
            num_credit_allocations=min(self._num_on_credit + len(builder.quiet), MAX_CREDIT_ALLOCATIONS),
        )
        added: set[int] = set()
        hashes: list[bytes] = []
        for row in builder.rows:
            if isinstance(row, DecodeRow):
                self._put_decodes(step, row, hashes)
                added.update([request.number for request in row.requests])
                continue
            request = row.request
            appended = moved = 0
            if request:
                row.num_sent_hashes, row.num_sent_tokens = len(request.hashes), request.num_tokens
            if request and request.number not in added:
                if not request.declared:
                    if row.operation not in _DECLARING:
                        raise NotFoundError("REQUEST_NOT_FOUND", f"the service has no request {request.request_id!r}")
                    self._put_row(step, Row(Operation.ADD, request, row.answer), request.num_tokens)
                    step.request_ids.append(request.request_id)
                    step.lora_names.append(request.extra_keys.lora_name or "")
                else:
                    appended = request.num_tokens - request.num_sent_tokens
                    moved = request.num_computed_tokens - request.num_sent_computed_tokens
                    moved += builder.quiet.get(request, 0)
                added.add(request.number)
                hashes += request.hashes[request.num_sent_hashes :]
                if self._sends_tokens:
                    step.token_ids += request.token_ids[request.num_sent_tokens :]
            self._put_row(step, row, appended, moved)
        step.block_hashes = b"".join(hashes)
        complete_options(step)
        for name in _OFTEN_EMPTY:
            if not any(getattr(step, name)):
                setattr(step, name, [])
        self._unanswered = (step, builder)
        return step

    def check_settled(self) -> None:
        """Raises what the session ended with; or WrongStateError if a step was sent that has no answer yet."""
        if self._over:
            raise self._over.with_traceback(None)
        if self._unanswered:
            raise WrongStateError("UNSETTLED", "the step before has no answer yet: settle it, or close the session")

    def unanswered(self) -> Step | None:
        """The step that was sent and has no answer."""
        return self._unanswered[0] if self._unanswered else None

    def fail(self, error: KvpoolError) -> None:
        """Takes note of what a step ended with: refused, it changed nothing; else it stays unanswered."""
        if _is_refusal(error):
            self._unanswered = None

    def note(self, error: KvpoolError) -> None:
        """Takes note of what any call ended with: it may be that the session is over."""
        if ends_session(error):
            self._over = error
            self._unanswered = None

    def finish(self, result: StepResult) -> None:
        """Takes note of the step's result: fills its answers and the requests' tables.

        Raises:
            ServerError: The step cannot have this result. Nothing of it is believed, and the step stays unanswered.
        """
        if self._unanswered is None:
            raise WrongStateError("NO_STEP", "no step waits for a result")
        step, builder = self._unanswered
        check_result(step, result, *self._bounds)
        self._unanswered = None
        self.sequence, self.free_blocks = step.sequence, result.free_blocks
        self._num_on_credit = 0
        builder.settle_credit()
        self.note_executed(step.executed_sequence)
        self._deferred.untold = builder.filled
        if builder.filled or not _CACHING.isdisjoint(step.operations):
            self._caching_sequence = step.sequence
        block_ids = iter(result.block_ids)
        at = 0
        for row in builder.rows:
            if isinstance(row, DecodeRow):
                self._read_decodes(row, at, result, block_ids)
                at += len(row.requests)
            else:
                at += step.operations[at] == Operation.ADD
                self._read_row(row, at, result, block_ids)
                at += 1

    @property
    def is_telling(self) -> bool:
        """Whether the step without an answer only tells what was filled: nobody but the session knows of it."""
        return self._is_telling and self._unanswered is not None

    def must_tell(self, executed_sequence: int) -> bool:
        """Whether a step has to say that so much has run, since it also has to tell what was filled by then."""
        return bool(self._deferred.untold) and not self._unanswered and executed_sequence >= self.sequence

    def note_executed(self, executed_sequence: int) -> None:
        """Takes note that the service was told which steps have run."""
        self._told_sequence = max(self._told_sequence, executed_sequence)

    def _put_row(self, step: Step, row: Row, appended: int, moved: int = 0) -> None:
        step.operations.append(row.operation)
        step.request_numbers.append(row.request.number if row.request else 0)
        step.num_appended_tokens.append(appended)
        step.num_new_tokens.append(row.num_new_tokens)
        rejected = row.num_rejected_tokens
        if rejected and row.request not in self._deferred.untold:
            both = min(moved, rejected)
            moved, rejected = moved - both, rejected - both
        step.num_taken_tokens.append(moved)
        step.num_rejected_tokens.append(rejected)
        step.num_lookahead_tokens.append(row.num_lookahead_tokens)
        step.num_encoder_tokens.append(row.num_encoder_tokens)
        step.delay_cache_blocks.append(row.delay_cache_blocks)
        if row.options is not DEFAULT_OPTIONS:
            put_options(step, row.options)
        promised: Sequence[Sequence[int]] = row.computed.block_ids if row.computed else (row.block_ids,)
        if step.num_block_ids or any(promised):
            before = (len(step.operations) - 1) * self._num_groups
            step.num_block_ids += [0] * (before - len(step.num_block_ids))
            counts = [len(ids) for ids in promised]
            step.num_block_ids += counts + [0] * (self._num_groups - len(counts))
            for ids in promised:
                step.block_ids += ids

    def _put_decodes(self, step: Step, row: DecodeRow, hashes: list[bytes]) -> None:
        requests, count = row.requests, len(row.requests)
        row.num_sent_tokens = [len(request.token_ids) for request in requests]
        if self._hash_block_size:
            row.num_sent_hashes = [num_tokens // self._hash_block_size for num_tokens in row.num_sent_tokens]
            filled = [
                r for r, num_hashes in zip(requests, row.num_sent_hashes, strict=True) if num_hashes > r.num_sent_hashes
            ]
            hash_filled(filled)
            for request in filled:
                hashes += request.hashes[request.num_sent_hashes :]
        else:
            row.num_sent_hashes = [0] * count
        if self._sends_tokens:
            for request in requests:
                step.token_ids += request.token_ids[request.num_sent_tokens :]
        moved = [request.num_computed_tokens - request.num_sent_computed_tokens for request in requests]
        zeros = [0] * count
        step.operations += [Operation.ALLOCATE] * count
        step.request_numbers += [request.number for request in requests]
        step.num_appended_tokens += [
            num_tokens - request.num_sent_tokens
            for num_tokens, request in zip(row.num_sent_tokens, requests, strict=True)
        ]
        step.num_new_tokens += [1] * count
        step.num_taken_tokens += moved
        step.num_rejected_tokens += zeros
        step.num_lookahead_tokens += [row.num_lookahead_tokens] * count
        step.num_encoder_tokens += zeros
        step.delay_cache_blocks += [False] * count
        if step.num_block_ids:
            step.num_block_ids += zeros * self._num_groups

    def _read_decodes(self, row: DecodeRow, at: int, result: StepResult, block_ids: Iterator[int]) -> None:
        groups, answer = self._num_groups, row.answer
        outcomes, counts = result.outcomes, result.num_new_blocks
        sent = zip(row.requests, row.places, row.num_sent_tokens, row.num_sent_hashes, strict=True)
        for i, (request, place, num_sent_tokens, num_sent_hashes) in enumerate(sent, at):
            request.num_sent_tokens, request.num_sent_hashes = num_sent_tokens, num_sent_hashes
            outcome = outcomes[i] if outcomes else 0
            if self._windowed and outcome in _SKIPPING:
                self._skip_blocks(request)
            if outcome:
                answer.refused[place] = Outcome(outcome)
                request.num_sent_computed_tokens = request.num_computed_tokens
                continue
            of_request = counts[i * groups : (i + 1) * groups]
            if any(of_request):
                new = answer.new_blocks[place] = [list(islice(block_ids, count)) for count in of_request]
                for table, new_ids in zip(request.block_ids, new, strict=True):
                    table.extend(new_ids)
            num_before = request.num_computed_tokens
            request.num_sent_computed_tokens = num_before + 1
            request.have_room(num_before + 1, self._credit_tokens(request, num_before, num_before + 1))

    def _read_row(self, row: Row, i: int, result: StepResult, block_ids: Iterator[int]) -> None:
        answer, request, groups = row.answer, row.request, self._num_groups
        answer.outcome = Outcome(result.outcomes[i]) if result.outcomes else Outcome.OK
        answer.num_hit_tokens = result.num_hit_tokens[i] if result.num_hit_tokens else 0
        answer.num_shared_hit_tokens = result.num_shared_hit_tokens[i] if result.num_shared_hit_tokens else 0
        answer.num_new_tokens = result.num_new_tokens[i] if result.num_new_tokens else 0
        hits = result.num_prefix_blocks[i * groups : (i + 1) * groups]
        if row.operation is Operation.COMMON_PREFIX:
            answer.num_common_blocks = hits or [0] * groups
            hits = []
        new = result.num_new_blocks[i * groups : (i + 1) * groups]
        answer.hit_blocks = [list(islice(block_ids, count)) for count in hits or [0] * groups]
        answer.new_blocks = [list(islice(block_ids, count)) for count in new or [0] * groups]
        if request is None:
            return
        gone = row.operation is Operation.FREE
        request.declared = not gone
        request.num_sent_tokens = 0 if gone else row.num_sent_tokens
        request.num_sent_hashes = 0 if gone else row.num_sent_hashes
        request.num_credit_tokens += row.num_rejected_tokens
        # Whether it came as far as to skip blocks, the next one will tell.
        is_unknown = row.options.full_sequence_must_fit and not answer.ok
        if row.operation is Operation.ALLOCATE and answer.outcome in _SKIPPING and not is_unknown:
            self._skip_blocks(request, row.options.num_in_flight_tokens)
        if row.operation in (Operation.FREE, Operation.PREEMPT):
            request.forget_blocks()
        elif row.operation is Operation.APPEND:  # it tells what was filled
            end_tokens = request.num_computed_tokens
            request.have_room(end_tokens, self._credit_tokens(request, end_tokens, end_tokens))
        elif row.operation in (Operation.ADMIT, Operation.ALLOCATE) and answer.ok:
            self._take_room(row, request)
        request.num_sent_computed_tokens = request.num_computed_tokens

    def _skip_blocks(self, request: Request, num_in_flight_tokens: int = 0) -> None:
        """Does in the session's copy what the server did: blocks that nothing looks at any more stand null."""
        num_run_tokens = max(request.num_computed_tokens - num_in_flight_tokens, 0)
        for group_id, room in self._windowed:
            table = request.block_ids[group_id]
            i = min(room.spec.num_skipped_tokens(num_run_tokens) // room.span_tokens, len(table)) - 1
            while i >= 0 and table[i] != NULL_BLOCK:
                table[i] = NULL_BLOCK
                i -= 1

    def _take_room(self, row: Row, request: Request) -> None:
        answer = row.answer
        hit: Sequence[Sequence[int]] = answer.hit_blocks
        if row.operation is Operation.ADMIT:
            before_tokens, num_new_tokens = answer.num_hit_tokens, answer.num_new_tokens
        else:
            hit = row.computed.block_ids if row.computed else hit
            before_tokens = request.num_computed_tokens + (row.computed.num_tokens if row.computed else 0)
            num_new_tokens = row.num_new_tokens
        if row.options.num_external_tokens:
            before_tokens += row.options.num_external_tokens
            hit = self._moved_on(hit or [[]] * len(self._rooms), before_tokens)
        for table, hit_ids, new_ids in zip(request.block_ids, hit, answer.new_blocks, strict=True):
            table.extend(hit_ids)
            table.extend(new_ids)
        end_tokens = before_tokens + num_new_tokens
        num_run_tokens = max(before_tokens - row.options.num_in_flight_tokens, 0)
        credit_tokens = 0 if row.delay_cache_blocks else self._credit_tokens(request, num_run_tokens, end_tokens)
        request.have_room(end_tokens, credit_tokens)

    def _moved_on(self, hit: Sequence[Sequence[int]], num_computed_tokens: int) -> list[list[int]]:
        """A hit's blocks where external tokens after it move windows on: what these leave behind stands null."""
        moved = []
        for room, ids in zip(self._rooms, hit, strict=True):
            count = room.spec.num_skipped_tokens(num_computed_tokens) // room.span_tokens
            moved.append([NULL_BLOCK] * count + list(ids[count:]))
        return moved

    def _credit_tokens(self, request: Request, before_tokens: int, end_tokens: int) -> int:
        """The server's credit, or less, after room was made for tokens from `before_tokens` on."""
        cached_tokens, num_tokens = end_tokens, request.num_sent_tokens  # not those that came since
        if num_tokens < cached_tokens:  # noqa: PLR1730 - min() takes longer than all else here
            cached_tokens = num_tokens
        bound, tables = self._max_credit_tokens, request.block_ids
        for room, table in zip(self._rooms, tables, strict=True):
            num_blocks, span, num_skipped = len(table), room.span_tokens, 0
            if room.skips:
                num_skipped = min(room.spec.num_skipped_tokens(before_tokens) // span, num_blocks)
            tokens = room.num_tokens(num_blocks, cached_tokens // span, num_skipped)
            if tokens < bound:  # noqa: PLR1730 - likewise
                bound = tokens
        return bound
