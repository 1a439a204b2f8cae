"""Builds steps and reads their results, without I/O: what sync and asyncio sessions share.

1. A step is built from what requests are when it is sent; nothing counts as sent until its result is there. A step
   that is refused leaves the session's view as it was, as it leaves the server's.
2. A step without an answer stays the next one to be sent: the same number gets the same answer again.
3. A session that the server has told to be over stays so: every later step is told the same, unsent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

from kvpool.client.check_result import check_result
from kvpool.client.request import Request
from kvpool.client.results import Admission, Allocation, Answer, HitChanged
from kvpool.server.core.config import PoolConfig
from kvpool.server.core.errors import (
    AbortedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    WrongStateError,
)
from kvpool.server.core.pool import ComputedBlocks
from kvpool.server.core.specs import allocation_spec
from kvpool.server.core.step import Operation, Outcome, Step, StepResult
from kvpool.server.core.types import NULL_BLOCK, BlockId

_REFUSALS: Final = (InvalidArgumentError, NotFoundError, WrongStateError, ExhaustedError)
_DECLARING: Final = frozenset((Operation.LOOK_UP, Operation.PEEK, Operation.ADMIT, Operation.ALLOCATE))
_SKIPPING: Final = frozenset((Outcome.OK, Outcome.NO_BLOCKS, Outcome.OVER_QUOTA))
"""Outcomes of ALLOCATE before which blocks that slid out of a window were freed."""

ResultT = TypeVar("ResultT")


def _is_refusal(error: KvpoolError) -> bool:
    """Whether a step that ended so is known to have changed nothing.

    A server that says when to come back may not have looked whether the step was applied when it was sent before.
    """
    return isinstance(error, _REFUSALS) and error.retry_seconds is None


def ends_session(error: KvpoolError) -> bool:
    """Whether a session that was answered so is over: nothing of it will be answered otherwise."""
    return isinstance(error, AbortedError) or error.reason == "SESSION_NOT_FOUND"


@dataclass(slots=True)
class _Row:
    operation: Operation
    request: Request | None
    answer: Answer
    num_new_tokens: int = 0
    num_rejected_tokens: int = 0
    num_lookahead_tokens: int = 0
    num_encoder_tokens: int = 0
    delay_cache_blocks: bool = False
    computed: ComputedBlocks | None = None
    block_ids: Sequence[int] = ()


class StepBuilder:
    """The operations of one step, in the order in which they are asked for.

    Each method returns an answer that is filled when the step has been sent and answered. After the first operation
    that finds too few blocks (`Outcome.NO_BLOCKS`), or would pass the session's max_blocks (`Outcome.OVER_QUOTA`),
    later ones that would take blocks are not tried (`Outcome.SKIPPED`).
    """

    def __init__(self, admission_budget_tokens: int = 0) -> None:
        """Starts a step.

        Args:
            admission_budget_tokens: Tokens that all admissions together may make room for; 0 for no limit.
        """
        self.admission_budget_tokens = admission_budget_tokens
        self.executed_sequence = 0
        self.rows: list[_Row] = []

    def admit(
        self,
        request: Request,
        max_new_tokens: int = 0,
        *,
        num_lookahead_tokens: int = 0,
        num_encoder_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> Answer:
        """Looks up, then makes room for as many of the tokens left as the budgets allow, atomically.

        Args:
            request: A request that holds no blocks.
            max_new_tokens: Most tokens to make room for, beyond the hit; 0 for all that are left.
            num_lookahead_tokens: Tokens beyond these to keep room for.
            num_encoder_tokens: Tokens that the encoder puts out, for models with cross attention.
            delay_cache_blocks: Leave full blocks uncached until `cache_blocks`.
        """
        return self._add(
            Operation.ADMIT,
            request,
            num_new_tokens=max_new_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            num_encoder_tokens=num_encoder_tokens,
            delay_cache_blocks=delay_cache_blocks,
        )

    def allocate_slots(  # noqa: PLR0913 - the reference's own parameters
        self,
        request: Request,
        num_new_tokens: int,
        *,
        computed: ComputedBlocks | None = None,
        num_computed_tokens: int | None = None,
        num_lookahead_tokens: int = 0,
        num_encoder_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> Answer:
        """Makes room for more tokens of a request, and caches the blocks that become full.

        Args:
            request: The request.
            num_new_tokens: Tokens to make room for, beyond the computed ones and the hit.
            computed: What a look-up promised, for a request that holds no blocks.
            num_computed_tokens: Computed tokens, if fewer than have room (drafts were rejected).
            num_lookahead_tokens: Tokens beyond the new ones to keep room for (drafts).
            num_encoder_tokens: Tokens that the encoder puts out, for models with cross attention; in the call that
                finds the request without blocks.
            delay_cache_blocks: Leave full blocks uncached until `cache_blocks`.
        """
        rejected = 0 if num_computed_tokens is None else request.num_computed_tokens - num_computed_tokens
        return self._add(
            Operation.ALLOCATE,
            request,
            num_new_tokens=num_new_tokens,
            num_rejected_tokens=rejected,
            num_lookahead_tokens=num_lookahead_tokens,
            num_encoder_tokens=num_encoder_tokens,
            delay_cache_blocks=delay_cache_blocks,
            computed=computed,
        )

    def get_computed_blocks(self, request: Request, *, counted: bool = True) -> Answer:
        """Looks up the longest cached prefix of a request that holds no blocks; its last token is never hit."""
        return self._add(Operation.LOOK_UP if counted else Operation.PEEK, request)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> Answer:
        """Caches the full blocks among the first `num_computed_tokens` tokens (after delay_cache_blocks)."""
        return self._add(Operation.CACHE, request, num_new_tokens=num_computed_tokens)

    def free(self, request: Request) -> Answer:
        """Frees the request's blocks and forgets it. One that the server never heard of is just forgotten."""
        if not request.declared and not any(row.request is request for row in self.rows):
            return Answer(Outcome.OK)
        return self._add(Operation.FREE, request)

    def preempt(self, request: Request) -> Answer:
        """Frees the request's blocks; it keeps its tokens and will be admitted again."""
        return self._add(Operation.PREEMPT, request)

    def evict_blocks(self, block_ids: Sequence[int]) -> Answer:
        """Drops the hashes of blocks."""
        return self._add(Operation.EVICT, None, block_ids=block_ids)

    def reset_prefix_cache(self) -> Answer:
        """Drops all hashes, if no request of any session holds a block."""
        return self._add(Operation.RESET, None)

    def get_common_prefix_blocks(self, request: Request) -> Answer:
        """Counts the leading blocks that all of the session's requests that hold blocks have in common."""
        return self._add(Operation.COMMON_PREFIX, request)

    def _add(self, operation: Operation, request: Request | None, **columns: object) -> Answer:
        answer = Answer()
        self.rows.append(_Row(operation, request, answer, **columns))  # type: ignore[arg-type]
        return answer


class StepBook:
    """A session's numbers: builds its steps, reads their results."""

    def __init__(self, config: PoolConfig, sequence: int = 0) -> None:
        self._num_groups = len(config.groups)
        self._bounds = (len(config.groups), config.num_blocks, config.max_model_len)
        self._sends_tokens = config.makes_events
        specs = [allocation_spec(group.spec) for group in config.groups]
        spanned = enumerate(zip(specs, config.spans_tokens, strict=True))
        self._windowed = [(i, spec, span_tokens) for i, (spec, span_tokens) in spanned if not spec.keeps_all]
        self._unanswered: tuple[Step, StepBuilder] | None = None
        self._over: KvpoolError | None = None
        self.sequence = sequence

    def build(self, builder: StepBuilder) -> Step:
        """Makes the next step; `finish` must follow before the one after it, or `fail` with what settles it.

        Raises:
            KvpoolError: As `check_settled`.
        """
        self.check_settled()
        step = Step(
            self.sequence + 1,
            executed_sequence=builder.executed_sequence,
            admission_budget_tokens=builder.admission_budget_tokens,
        )
        added: set[int] = set()
        hashes: list[bytes] = []
        for row in builder.rows:
            request = row.request
            appended = 0
            if request and request.number not in added:
                if not request.declared:
                    if row.operation not in _DECLARING:
                        raise NotFoundError("REQUEST_NOT_FOUND", f"the service has no request {request.request_id!r}")
                    self._put_row(step, _Row(Operation.ADD, request, row.answer), request.num_tokens)
                    step.request_ids.append(request.request_id)
                    step.lora_names.append(request.extra_keys.lora_name or "")
                else:
                    appended = request.num_tokens - request.num_sent_tokens
                added.add(request.number)
                hashes += request.hashes[request.num_sent_hashes :]
                if self._sends_tokens:
                    step.token_ids += request.token_ids[request.num_sent_tokens :]
            self._put_row(step, row, appended)
        step.block_hashes = b"".join(hashes)
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
        self.sequence = step.sequence
        block_ids = iter(result.block_ids)
        rows = iter(builder.rows)
        for i, operation in enumerate(step.operations):
            if operation != Operation.ADD:
                self._read_row(next(rows), i, result, block_ids)

    def _put_row(self, step: Step, row: _Row, appended: int) -> None:
        step.operations.append(row.operation)
        step.request_numbers.append(row.request.number if row.request else 0)
        step.num_appended_tokens.append(appended)
        step.num_new_tokens.append(row.num_new_tokens)
        step.num_rejected_tokens.append(row.num_rejected_tokens)
        step.num_lookahead_tokens.append(row.num_lookahead_tokens)
        step.num_encoder_tokens.append(row.num_encoder_tokens)
        step.delay_cache_blocks.append(row.delay_cache_blocks)
        promised: Sequence[Sequence[int]] = row.computed.block_ids if row.computed else (row.block_ids,)
        if step.num_block_ids or any(promised):
            before = (len(step.operations) - 1) * self._num_groups
            step.num_block_ids += [0] * (before - len(step.num_block_ids))
            counts = [len(ids) for ids in promised]
            step.num_block_ids += counts + [0] * (self._num_groups - len(counts))
            for ids in promised:
                step.block_ids += ids

    def _read_row(self, row: _Row, i: int, result: StepResult, block_ids: Iterator[int]) -> None:
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
        request.num_sent_tokens = 0 if gone else request.num_tokens
        request.num_sent_hashes = 0 if gone else len(request.hashes)
        request.num_computed_tokens -= row.num_rejected_tokens
        if row.operation is Operation.ALLOCATE and answer.outcome in _SKIPPING:
            self._skip_blocks(request)
        if row.operation in (Operation.FREE, Operation.PREEMPT):
            request.forget_blocks()
        elif row.operation in (Operation.ADMIT, Operation.ALLOCATE) and answer.ok:
            self._take_room(row, request)

    def _skip_blocks(self, request: Request) -> None:
        """Does in the session's copy what the server did: blocks that nothing looks at any more stand null."""
        for group_id, spec, span_tokens in self._windowed:
            table = request.block_ids[group_id]
            i = min(spec.num_skipped_tokens(request.num_computed_tokens) // span_tokens, len(table)) - 1
            while i >= 0 and table[i] != NULL_BLOCK:
                table[i] = NULL_BLOCK
                i -= 1

    @staticmethod
    def _take_room(row: _Row, request: Request) -> None:
        answer = row.answer
        hit: Sequence[Sequence[int]] = answer.hit_blocks
        if row.operation is Operation.ADMIT:
            request.num_computed_tokens = answer.num_hit_tokens + answer.num_new_tokens
        else:
            hit = row.computed.block_ids if row.computed else hit
            request.num_computed_tokens += row.num_new_tokens + (row.computed.num_tokens if row.computed else 0)
        for table, hit_ids, new_ids in zip(request.block_ids, hit, answer.new_blocks, strict=True):
            table.extend(hit_ids)
            table.extend(new_ids)


Call = tuple[StepBuilder, Callable[[], ResultT]]
"""A step of one operation, and what makes its result once it has been answered."""


def call_get_computed_blocks(request: Request, *, counted: bool) -> Call[ComputedBlocks]:
    """See `StepBuilder.get_computed_blocks`."""
    builder = StepBuilder()
    answer = builder.get_computed_blocks(request, counted=counted)
    return builder, lambda: _computed(answer)


def call_admit(
    request: Request, max_new_tokens: int, num_lookahead_tokens: int, num_encoder_tokens: int
) -> Call[Admission | None]:
    """See `StepBuilder.admit`."""
    builder = StepBuilder()
    answer = builder.admit(
        request, max_new_tokens, num_lookahead_tokens=num_lookahead_tokens, num_encoder_tokens=num_encoder_tokens
    )
    return (
        builder,
        lambda: (
            Admission(answer.num_hit_tokens, answer.num_new_tokens, answer.hit_blocks, answer.new_blocks)
            if answer.ok
            else None
        ),
    )


def call_allocate_slots(  # noqa: PLR0913 - the reference's own parameters
    request: Request,
    num_new_tokens: int,
    computed: ComputedBlocks | None,
    num_computed_tokens: int | None,
    num_lookahead_tokens: int,
    *,
    num_encoder_tokens: int,
    delay_cache_blocks: bool,
) -> Call[Allocation | HitChanged | None]:
    """See `StepBuilder.allocate_slots`."""
    builder = StepBuilder()
    answer = builder.allocate_slots(
        request,
        num_new_tokens,
        computed=computed,
        num_computed_tokens=num_computed_tokens,
        num_lookahead_tokens=num_lookahead_tokens,
        num_encoder_tokens=num_encoder_tokens,
        delay_cache_blocks=delay_cache_blocks,
    )

    def read() -> Allocation | HitChanged | None:
        if answer.outcome is Outcome.HIT_CHANGED:
            return HitChanged(_computed(answer))
        return Allocation(answer.new_blocks) if answer.ok else None

    return builder, read


def call_simply(fill: Callable[[StepBuilder], Answer]) -> Call[Answer]:
    """One operation, whose answer is told as it is."""
    builder = StepBuilder()
    answer = fill(builder)
    return builder, lambda: answer


def _computed(answer: Answer) -> ComputedBlocks:
    return ComputedBlocks(tuple([BlockId(b) for b in blocks] for blocks in answer.hit_blocks), answer.num_hit_tokens)
