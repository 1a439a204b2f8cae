"""Applies the result of a step: fills the answers, and keeps the session's copy of the block tables."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Final

from kvpool.client.request import Request
from kvpool.client.reserves import Spans, cut, hand_over, set_held
from kvpool.client.rows import DecodeRow, ReserveRow, Row
from kvpool.client.step_builder import StepBuilder
from kvpool.core.ids import NULL_BLOCK, GroupId
from kvpool.core.specs.kinds import allocation_spec, has_gaps, num_draft_blocks
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import LEAVING, LOOKING_UP, Operation, Outcome, Step, StepResult
from kvpool.wire.errors import ServerError

_SKIPPING: Final = frozenset((Outcome.OK, Outcome.NO_BLOCKS, Outcome.OVER_QUOTA, Outcome.NEVER_FITS))
"""Outcomes of ALLOCATE before which the blocks that slid out of a window were freed."""
_OUTCOMES: Final = frozenset(Outcome)
_COLUMNS: Final = (
    ("outcomes", 1),
    ("num_hit_tokens", 1),
    ("num_shared_hit_tokens", 1),
    ("num_host_hit_tokens", 1),
    ("num_new_tokens", 1),
    ("shared_prefix_boundary_tokens", 1),
    ("credit_tokens", 1),
    ("num_prefix_blocks", 0),
    ("num_new_blocks", 0),
)
"""Columns of a result, and their number of entries per row; 0 for one per group."""


class ResultReader:
    """Applies the results of a session's steps.

    Attributes:
        holders: Requests that may hold a reserve.
    """

    def __init__(self, config: PoolConfig, spans: Spans, *, reserves: bool) -> None:
        self.holders: dict[Request, None] = {}  # in order, so that equal calls make equal steps
        self._spans = spans
        self._reserves = reserves
        self._max_tokens = config.max_model_len
        self._num_groups = len(config.groups)
        self._num_blocks = config.num_blocks
        self._num_ids = config.num_ids
        self._specs = [
            (allocation_spec(group.spec), config.span_tokens(GroupId(i))) for i, group in enumerate(config.groups)
        ]
        self._windowed = [
            (i, spec, span_tokens, has_gaps(spec))
            for i, (spec, span_tokens) in enumerate(self._specs)
            if not spec.keeps_all
        ]
        self._moving = [
            (i, num_draft_blocks(spec))
            for i, (spec, _) in enumerate(self._specs)
            if has_gaps(spec) and num_draft_blocks(spec)
        ]
        self._partial_hits = config.partial_hits

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
        if result.block_ids and max(result.block_ids) >= self._num_ids:
            raise _malformed("block_ids")
        prefix = result.num_prefix_blocks
        num_ids = sum(result.num_new_blocks) + sum(prefix)
        for i, operation in enumerate(step.operations if prefix else ()):
            if operation == Operation.COMMON_PREFIX:  # counts without ids
                num_ids -= sum(prefix[i * self._num_groups : (i + 1) * self._num_groups])
        if num_ids != len(result.block_ids):
            raise _malformed("block_ids")
        if self._num_ids > self._num_blocks:
            self._check_tiers(step, result)

    def _check_tiers(self, step: Step, result: StepResult) -> None:
        """Checks that requests get blocks of the first tier only. The ids are as many as the columns say.

        An allocation whose promised hit has blocks of host memory answers the hit again, with as many blocks.
        """
        groups, first_tier = self._num_groups, self._num_blocks
        if max(chain(step.block_ids, result.block_ids), default=0) < first_tier:
            return
        promised_ids, block_ids = iter(step.block_ids), iter(result.block_ids)
        for i, operation in enumerate(step.operations):
            outcome = result.outcomes[i] if result.outcomes else Outcome.OK
            promised_counts = step.num_block_ids[i * groups : (i + 1) * groups]
            promised = list(islice(promised_ids, sum(promised_counts)))
            counts = result.num_prefix_blocks[i * groups : (i + 1) * groups]
            hit = list(islice(block_ids, 0 if operation == Operation.COMMON_PREFIX else sum(counts)))
            new = list(islice(block_ids, sum(result.num_new_blocks[i * groups : (i + 1) * groups])))
            taken = new if operation in LOOKING_UP or outcome == Outcome.HIT_CHANGED else [*hit, *new]
            if max(taken, default=0) >= first_tier:
                raise _malformed("block_ids")
            has_moved = operation == Operation.ALLOCATE and max(promised, default=0) >= first_tier
            if has_moved and outcome == Outcome.OK and counts != promised_counts:
                raise _malformed("num_prefix_blocks")

    def check_copies(self, copied: Sequence[int]) -> None:
        """Checks the queue of groups, sources and targets, which is not empty; raises ServerError as `check_shape`."""
        pairs = zip(copied[1::3], copied[2::3], strict=False)
        if (
            len(copied) % 3
            or max(copied) >= self._num_ids
            or max(copied[::3]) >= self._num_groups
            or any(min(pair) >= self._num_blocks for pair in pairs)  # none is made between blocks of host memory
        ):
            raise _malformed("copied_block_ids")

    def apply(self, step: Step, builder: StepBuilder, result: StepResult) -> None:
        """Fills the answers of a step, and the tables of its requests."""
        block_ids = iter(result.block_ids)
        at = 0
        for row in builder.rows:
            if isinstance(row, DecodeRow):
                self._read_decodes(row, at, step, result, block_ids)
            elif isinstance(row, ReserveRow):
                self._read_reserves(row, at, step, result, block_ids)
            else:
                self._read_row(row, at, step, result, block_ids)
            at += 1 if isinstance(row, Row) else len(row.requests)

    def _read_decodes(self, row: DecodeRow, at: int, step: Step, result: StepResult, block_ids: Iterator[int]) -> None:
        answer, each = row.answer, self._read_batch(row, at, step, result, block_ids)
        for place, (request, outcome, new, credit_tokens) in zip(row.places, each, strict=True):
            num_computed = request.num_computed_tokens
            if outcome:
                answer.refused[place] = Outcome(outcome)
            else:
                answer.refused.pop(place, None)  # it was refused before its session gave its reserves back
                num_computed += 1
                if new:
                    num_slots = num_computed + row.num_lookahead_tokens
                    answer.new_blocks[place] = self._add_blocks(request, (), new, num_slots)
            self._set_computed(request, num_computed, credit_tokens)

    def _read_reserves(
        self, row: ReserveRow, at: int, step: Step, result: StepResult, block_ids: Iterator[int]
    ) -> None:
        """Requests may have computed more tokens since the step was sent."""
        sent, each = (
            zip(row.computed_tokens, row.held_tokens, strict=True),
            self._read_batch(row, at, step, result, block_ids),
        )
        for (computed_tokens, held_tokens), (request, _, new, credit_tokens) in zip(sent, each, strict=True):
            request.num_sent_computed_tokens = computed_tokens
            cut(request, self._spans, held_tokens)
            self._keep(request, new)
            set_held(request, self._spans, credit_tokens)

    def _read_batch(
        self, row: DecodeRow | ReserveRow, at: int, step: Step, result: StepResult, block_ids: Iterator[int]
    ) -> list[tuple[Request, int, list[list[int]], int]]:
        """Returns each request with its outcome, its new blocks per group, or none, and its credit."""
        groups, end, found = self._num_groups, at + len(row.requests), []
        credit = result.credit_tokens[at:end] or [0] * len(row.requests)
        outcomes = result.outcomes[at:end] or [0] * len(row.requests)
        for i, request in enumerate(row.requests):
            request.num_sent_tokens += step.num_appended_tokens[at + i]
            if self._windowed and outcomes[i] in _SKIPPING:
                self._skip_blocks(request, row.run_tokens[i])
            counts = result.num_new_blocks[(at + i) * groups : (at + i + 1) * groups]
            new = [list(islice(block_ids, count)) for count in counts] if any(counts) else []
            found.append((request, outcomes[i], new, credit[i]))
        return found

    def _read_row(self, row: Row, i: int, step: Step, result: StepResult, block_ids: Iterator[int]) -> None:
        answer, request, groups, operation = row.answer, row.request, self._num_groups, row.operation
        outcome = answer.outcome = Outcome(result.outcomes[i]) if result.outcomes else Outcome.OK
        answer.num_hit_tokens = result.num_hit_tokens[i] if result.num_hit_tokens else 0
        answer.num_shared_hit_tokens = result.num_shared_hit_tokens[i] if result.num_shared_hit_tokens else 0
        answer.num_host_hit_tokens = result.num_host_hit_tokens[i] if result.num_host_hit_tokens else 0
        answer.num_new_tokens = result.num_new_tokens[i] if result.num_new_tokens else 0
        boundaries = result.shared_prefix_boundary_tokens
        answer.shared_prefix_boundary_tokens = boundaries[i] if boundaries else 0
        hits = result.num_prefix_blocks[i * groups : (i + 1) * groups]
        answer.num_common_blocks = []
        if operation == Operation.COMMON_PREFIX:
            answer.num_common_blocks = hits or [0] * groups
            hits = []
        new = result.num_new_blocks[i * groups : (i + 1) * groups]
        answer.hit_blocks = [list(islice(block_ids, count)) for count in hits or [0] * groups]
        answer.new_blocks = [list(islice(block_ids, count)) for count in new or [0] * groups]
        if request is None:
            return
        num_computed, is_ok = row.num_computed_tokens, outcome is Outcome.OK
        request.freed = operation == Operation.FREE
        request.declared = not request.freed
        request.num_sent_tokens += step.num_appended_tokens[i]
        sent = step.num_prompt_tokens[i] if step.num_prompt_tokens else 0
        request.num_prompt_tokens = 0 if sent == request.num_prompt_tokens else request.num_prompt_tokens
        if request.freed:
            request.num_sent_tokens = 0
        lookahead: int = row.arguments.get("num_lookahead_tokens", 0)
        if operation in LEAVING:
            request.forget_blocks()
            self.holders.pop(request, None)
            num_computed = 0
        elif operation == Operation.ALLOCATE:
            # With full_sequence_must_fit, a refused allocation may not have reached the point of freeing blocks that
            # slid out of a window. The next allocation frees them in any case.
            if self._windowed and outcome in _SKIPPING and (is_ok or not row.options.full_sequence_must_fit):
                self._skip_blocks(request, num_computed - row.options.num_in_flight_tokens)
            if is_ok:
                hit: Sequence[Sequence[int]] = ()
                if row.computed or row.options.num_external_tokens:
                    hit, num_computed = self._hit(row)
                    hit = self._uncopied(hit, num_computed)
                num_computed += row.arguments["num_new_tokens"]
                answer.new_blocks = self._add_blocks(request, hit, answer.new_blocks, num_computed + lookahead)
        elif operation == Operation.ADMIT and is_ok:
            num_computed = answer.num_hit_tokens + answer.num_new_tokens
            hit = self._uncopied(answer.hit_blocks, answer.num_hit_tokens)
            answer.new_blocks = self._add_blocks(request, hit, answer.new_blocks, num_computed + lookahead)
        self._set_computed(request, num_computed, result.credit_tokens[i] if result.credit_tokens else 0)

    def _set_computed(self, request: Request, num_computed_tokens: int, held_tokens: int) -> None:
        request.num_computed_tokens = request.num_sent_computed_tokens = num_computed_tokens
        if self._reserves:
            set_held(request, self._spans, held_tokens)
        else:
            request.credit_tokens = request.held_tokens = held_tokens

    def _uncopied(self, hit: Sequence[Sequence[int]], num_hit_tokens: int) -> Sequence[Sequence[int]]:
        """The blocks of a hit that a request keeps: a copy, its first new block, replaces one within which it ends."""
        if not self._partial_hits:
            return hit
        spans = [span_tokens for _, span_tokens in self._specs]
        return [ids[:-1] if num_hit_tokens % span else ids for ids, span in zip(hit, spans, strict=True)]

    def _add_blocks(
        self, request: Request, hit: Sequence[Sequence[int]], new: list[list[int]], num_tokens: int
    ) -> list[list[int]]:
        """Adds the blocks of a hit, and new ones. Returns the new ones of the first `num_tokens` tokens.

        Those of later tokens are kept in reserve.
        """
        added = [[*first, *more] for first, more in zip(hit, new, strict=True)] if hit else new
        if self._reserves:
            self._keep(request, added)
            taken = hand_over(request, self._spans, min(num_tokens, self._max_tokens))
            return [ids[len(first) :] for ids, first in zip(taken, hit, strict=True)] if hit else taken
        for group_id, num_drafts in self._moving:  # the server moves blocks for drafts to the end, see `state_manager`
            table, moved = request.block_ids[group_id], added[group_id]
            table[-num_drafts:] = [NULL_BLOCK if each in moved else each for each in table[-num_drafts:]]
        for table, ids in zip(request.block_ids, added, strict=True):
            table.extend(ids)
        return new

    def _keep(self, request: Request, new: Sequence[Sequence[int]]) -> None:
        """Adds new blocks to the reserve of a request."""
        if new:
            reserve = request.reserve_ids or [[] for _ in new]
            request.reserve_ids = [[*kept, *added] for kept, added in zip(reserve, new, strict=True)]
            self.holders[request] = None

    def _skip_blocks(self, request: Request, num_run_tokens: int) -> None:
        """Sets the blocks that no attention window reads any more to the null block, as the server does."""
        for group_id, spec, span_tokens, has_null_between in self._windowed:
            table = request.block_ids[group_id]
            i = min(spec.num_skipped_tokens(max(num_run_tokens, 0)) // span_tokens, len(table)) - 1
            while i >= 0 and table[i] != NULL_BLOCK:
                table[i] = NULL_BLOCK
                i -= 1
            if has_null_between and i > 0:  # null blocks come between states
                table[:i] = [NULL_BLOCK] * i

    def _hit(self, row: Row) -> tuple[Sequence[Sequence[int]], int]:
        """Returns the blocks that precede the new ones of an allocation, and the computed tokens with them.

        External tokens move the windows on: blocks that no window reads any more are null.
        """
        hit: Sequence[Sequence[int]] = row.computed.block_ids if row.computed else [[]] * self._num_groups
        if self._num_ids > self._num_blocks and any(row.answer.hit_blocks):
            hit = row.answer.hit_blocks  # where blocks of host memory were promised, those that they are copied to
        num_computed = row.num_computed_tokens + (row.computed.num_tokens if row.computed else 0)
        if not row.options.num_external_tokens:
            return hit, num_computed
        num_computed += row.options.num_external_tokens
        moved = []
        for (spec, span_tokens), ids in zip(self._specs, hit, strict=True):
            count = spec.num_skipped_tokens(num_computed) // span_tokens
            moved.append([NULL_BLOCK] * count + list(ids[count:]))
        return moved, num_computed


def _malformed(column: str) -> ServerError:
    return ServerError("BAD_ANSWER", "the server's answer is malformed", field=column)
