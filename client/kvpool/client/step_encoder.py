"""Encodes the operations of a step into its columns."""

from collections.abc import Sequence
from typing import Final

from kvpool.client.deferred_caching import DeferredCaching
from kvpool.client.request import hash_filled_blocks
from kvpool.client.step_builder import DecodeRow, Row, StepBuilder
from kvpool.core.errors import NotFoundError
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, OPTION_COLUMNS, AllocationOptions
from kvpool.core.steps.columns import MAX_CREDIT_ALLOCATIONS, Operation, Step

_DECLARING: Final = frozenset(
    (
        Operation.LOOKUP,
        Operation.LOOKUP_UNCOUNTED,
        Operation.LOOKUP_COUNTED_ON_ADMIT,
        Operation.ADMIT,
        Operation.ALLOCATE,
    )
)
"""Operations that may name a request that the service does not know yet."""
_OFTEN_EMPTY: Final = (
    "num_taken_tokens",
    "num_rejected_tokens",
    "num_lookahead_tokens",
    "num_encoder_tokens",
    "delay_cache_blocks",
)


class StepEncoder:
    """Encodes the steps of a session. Changes no request: the result of a step does."""

    def __init__(self, config: PoolConfig, deferred: DeferredCaching) -> None:
        self._num_groups = len(config.groups)
        self._sends_tokens = config.makes_events
        self._hash_block_size = config.hash_block_size if config.enable_caching else 0
        self._deferred = deferred

    def encode(self, builder: StepBuilder, sequence: int, num_credit_allocations: int) -> Step:
        """Makes a step of what the requests are now.

        Raises:
            NotFoundError: An operation names a request that the service does not know.
        """
        step = Step(
            sequence,
            executed_sequence=builder.executed_sequence,
            launched_sequence=builder.launched_sequence,
            admission_budget_tokens=builder.admission_budget_tokens,
            num_credit_allocations=min(num_credit_allocations, MAX_CREDIT_ALLOCATIONS),
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
                    moved += builder.on_credit.get(request, 0)
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
        return step

    def _put_row(self, step: Step, row: Row, appended: int, moved: int = 0) -> None:
        step.operations.append(row.operation)
        step.request_numbers.append(row.request.number if row.request else 0)
        step.num_appended_tokens.append(appended)
        step.num_new_tokens.append(row.num_new_tokens)
        rejected = row.num_rejected_tokens
        if rejected and row.request not in self._deferred.unreported:
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
            hash_filled_blocks(filled)
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


def put_options(step: Step, options: AllocationOptions) -> None:
    """Writes the options of a step's newest operation. Most steps have none of these columns."""
    before = len(step.operations) - 1
    for name in OPTION_COLUMNS:
        value = getattr(options, name)
        if value:
            column = getattr(step, name)
            column += [0] * (before - len(column))
            column.append(value)


def complete_options(step: Step) -> None:
    """Extends the option columns that a step has to one entry per operation."""
    for name in OPTION_COLUMNS:
        column = getattr(step, name)
        if column:
            column += [0] * (len(step.operations) - len(column))
