"""Results and field names of unary changes: each is a step with one operation, so that the core has a single way in."""

import re
from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import KvpoolError
from kvpool.core.steps.columns import Operation, Outcome, Step, StepResult
from kvpool.v1 import allocator_pb2

_INDEX: Final = re.compile(r"\[\d+\]$")
_FIELDS: Final = {
    "request_numbers": "request.request_number",
    "request_ids": "request.request_id",
    "lora_names": "request.lora_name",
    "num_appended_tokens": "request.num_appended_tokens",
    "block_hashes": "request.block_hashes",
    "token_ids": "request.token_ids",
}


@dataclass(slots=True)
class UnaryResult:
    """The result of a step's only operation.

    Attributes:
        outcome: Outcome of the operation.
        num_hit_tokens: Length of the hit in tokens.
        shared_prefix_boundary_tokens: See `StepResult`.
        num_prefix_blocks: Blocks of the hit or of the common prefix, per group.
        hit_blocks: Block ids of the hit, per group.
        new_blocks: Ids of newly allocated blocks, per group.
        copied_block_ids: See `StepResult`.
    """

    outcome: Outcome
    num_hit_tokens: int
    shared_prefix_boundary_tokens: int
    num_prefix_blocks: list[int]
    hit_blocks: list[list[int]]
    new_blocks: list[list[int]]
    copied_block_ids: list[int]


def result_of(result: StepResult, num_groups: int) -> UnaryResult:
    """Takes the result of a step with one operation apart."""
    queue = iter(result.block_ids)
    num_prefix_blocks = result.num_prefix_blocks or [0] * num_groups
    has_ids = bool(result.num_hit_tokens)
    hit_blocks = [[next(queue) for _ in range(count if has_ids else 0)] for count in num_prefix_blocks]
    new_blocks = [[next(queue) for _ in range(count)] for count in result.num_new_blocks or [0] * num_groups]
    return UnaryResult(
        Outcome(result.outcomes[0] if result.outcomes else 0),
        result.num_hit_tokens[0] if result.num_hit_tokens else 0,
        result.shared_prefix_boundary_tokens[0] if result.shared_prefix_boundary_tokens else 0,
        num_prefix_blocks,
        hit_blocks,
        new_blocks,
        result.copied_block_ids,
    )


def groups(blocks: list[list[int]]) -> list[allocator_pb2.GroupBlocks]:
    """Encodes block ids per group."""
    return [allocator_pb2.GroupBlocks(block_ids=block_ids) for block_ids in blocks]


def field_name(error: KvpoolError, step: Step) -> str:
    """Name of the message's field that became the column that an error names."""
    column, operation = _INDEX.sub("", error.field), step.operations[-1] if step.operations else None
    if column == "num_new_tokens" and operation == Operation.CACHE:
        return "num_computed_tokens"
    if column in ("num_block_ids", "block_ids"):
        return "block_ids" if operation == Operation.EVICT else "computed"
    return _FIELDS.get(column, column)
