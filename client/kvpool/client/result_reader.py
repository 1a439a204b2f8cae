"""Applies the result of a step: fills the answers, and keeps the session's copy of the block tables."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from kvpool.client.request import Request
from kvpool.client.step_builder import DecodeRow, Row, StepBuilder
from kvpool.core.blocks.credit import Credit
from kvpool.core.ids import NULL_BLOCK, GroupId
from kvpool.core.specs.kinds import MambaSpec
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Operation, Outcome, Step, StepResult
from kvpool.wire.errors import ServerError

_SKIPPING: Final = frozenset((Outcome.OK, Outcome.NO_BLOCKS, Outcome.OVER_QUOTA))
"""Outcomes of ALLOCATE before which the blocks that slid out of a window were freed."""
_OUTCOMES: Final = frozenset(Outcome)
_COLUMNS: Final = (
    ("outcomes", 1),
    ("num_hit_tokens", 1),
    ("num_shared_hit_tokens", 1),
    ("num_new_tokens", 1),
    ("num_prefix_blocks", 0),
    ("num_new_blocks", 0),
)
"""Columns of a result, and their number of entries per row; 0 for one per group."""


class ResultReader:
    """Applies the results of a session's steps."""

    def __init__(self, config: PoolConfig) -> None:
        self._num_groups = len(config.groups)
        self._num_blocks = config.num_blocks
        self._credits = [Credit.for_group(config, GroupId(i)) for i in range(len(config.groups))]
        self._windowed = [(i, credit) for i, credit in enumerate(self._credits) if credit.skips]
        # A step that overwrites a state must be known to the service, as the process that resumes the session has to
        # know that the step may have run.
        has_state = any(isinstance(credit.spec, MambaSpec) for credit in self._credits)
        self._max_credit_tokens = 0 if has_state else config.max_model_len

    def check_shape(self, step: Step, result: StepResult) -> None:
        """Checks that the result has the step's number, columns of the right length, and ids of existing blocks.

        Whether the result is possible for this step is not checked: both sides speak the same protocol version.

        Raises:
            ServerError: The result is malformed; names the column.
        """
        if result.sequence != step.sequence:
            raise _malformed("sequence")
        count = len(step.operations)
        for name, num_per_row in _COLUMNS:
            column = getattr(result, name)
            if column and len(column) != count * (num_per_row or self._num_groups):
                raise _malformed(name)
        if result.outcomes and not _OUTCOMES.issuperset(result.outcomes):
            raise _malformed("outcomes")
        if result.block_ids and max(result.block_ids) >= self._num_blocks:
            raise _malformed("block_ids")
        prefix = result.num_prefix_blocks
        num_ids = sum(result.num_new_blocks)
        if prefix:
            num_ids += sum(prefix)
            for i, operation in enumerate(step.operations):
                if operation == Operation.COMMON_PREFIX:  # counts without ids
                    num_ids -= sum(prefix[i * self._num_groups : (i + 1) * self._num_groups])
        if num_ids != len(result.block_ids):
            raise _malformed("block_ids")

    def apply(self, step: Step, builder: StepBuilder, result: StepResult) -> None:
        """Fills the answers of a step, and the tables of its requests."""
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
            request.set_computed(num_before + 1, self._credit_tokens(request, num_before, num_before + 1))

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
        # With full_sequence_must_fit, a refused allocation may not have reached the point of freeing blocks that slid
        # out of a window. The next allocation frees them in any case.
        is_unknown = row.options.full_sequence_must_fit and not answer.ok
        if row.operation is Operation.ALLOCATE and answer.outcome in _SKIPPING and not is_unknown:
            self._skip_blocks(request, row.options.num_in_flight_tokens)
        if row.operation in (Operation.FREE, Operation.PREEMPT):
            request.forget_blocks()
        elif row.operation is Operation.APPEND:  # reports blocks that decodes filled on credit
            end_tokens = request.num_computed_tokens
            request.set_computed(end_tokens, self._credit_tokens(request, end_tokens, end_tokens))
        elif row.operation in (Operation.ADMIT, Operation.ALLOCATE) and answer.ok:
            self._add_blocks(row, request)
        request.num_sent_computed_tokens = request.num_computed_tokens

    def _skip_blocks(self, request: Request, num_in_flight_tokens: int = 0) -> None:
        """Sets the blocks that no attention window reads any more to the null block, as the server does."""
        num_run_tokens = max(request.num_computed_tokens - num_in_flight_tokens, 0)
        for group_id, credit in self._windowed:
            table = request.block_ids[group_id]
            i = min(credit.spec.num_skipped_tokens(num_run_tokens) // credit.span_tokens, len(table)) - 1
            while i >= 0 and table[i] != NULL_BLOCK:
                table[i] = NULL_BLOCK
                i -= 1

    def _add_blocks(self, row: Row, request: Request) -> None:
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
            hit = self._skipped_hit(hit or [[]] * len(self._credits), before_tokens)
        for table, hit_ids, new_ids in zip(request.block_ids, hit, answer.new_blocks, strict=True):
            table.extend(hit_ids)
            table.extend(new_ids)
        end_tokens = before_tokens + num_new_tokens
        num_run_tokens = max(before_tokens - row.options.num_in_flight_tokens, 0)
        credit_tokens = 0 if row.delay_cache_blocks else self._credit_tokens(request, num_run_tokens, end_tokens)
        request.set_computed(end_tokens, credit_tokens)

    def _skipped_hit(self, hit: Sequence[Sequence[int]], num_computed_tokens: int) -> list[list[int]]:
        """The blocks of a hit after which external tokens move the windows on: null where no window reads any more."""
        moved = []
        for credit, ids in zip(self._credits, hit, strict=True):
            count = credit.spec.num_skipped_tokens(num_computed_tokens) // credit.span_tokens
            moved.append([NULL_BLOCK] * count + list(ids[count:]))
        return moved

    def _credit_tokens(self, request: Request, before_tokens: int, end_tokens: int) -> int:
        """The server's credit, or less, after slots were allocated from `before_tokens` on."""
        cached_tokens, num_tokens = end_tokens, request.num_sent_tokens  # without tokens appended since
        if num_tokens < cached_tokens:  # noqa: PLR1730 - min() takes longer than all else here
            cached_tokens = num_tokens
        bound, tables = self._max_credit_tokens, request.block_ids
        for credit, table in zip(self._credits, tables, strict=True):
            num_blocks, span, num_skipped = len(table), credit.span_tokens, 0
            if credit.skips:
                num_skipped = min(credit.spec.num_skipped_tokens(before_tokens) // span, num_blocks)
            tokens = credit.num_tokens(num_blocks, cached_tokens // span, num_skipped)
            if tokens < bound:  # noqa: PLR1730 - min() takes longer
                bound = tokens
        return bound


def _malformed(column: str) -> ServerError:
    return ServerError("BAD_ANSWER", "the server's answer is malformed", field=column)
