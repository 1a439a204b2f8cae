"""Checks a step's result before anything of it is believed: a server may be of another release, or no good.

What passes is a result that the step can have: nothing in it makes a table hold what no block has, or the same block
twice. That its blocks are not another request's is the server's to know.
"""

from collections.abc import Collection, Mapping
from typing import Final

from kvpool.client.errors import ServerError
from kvpool.core.steps.columns import Operation, Outcome, Step, StepResult

_OK: Final = frozenset((Outcome.OK,))
_OUTCOMES: Final[Mapping[int, Collection[int]]] = {
    Operation.LOOKUP: _OK | {Outcome.SKIPPED},
    Operation.LOOKUP_UNCOUNTED: _OK | {Outcome.SKIPPED},
    Operation.LOOKUP_COUNTED_ON_ADMIT: _OK | {Outcome.SKIPPED},
    Operation.ADMIT: _OK | {Outcome.NO_BLOCKS, Outcome.OVER_QUOTA, Outcome.SKIPPED},
    Operation.ALLOCATE: _OK | {Outcome.NO_BLOCKS, Outcome.OVER_QUOTA, Outcome.SKIPPED, Outcome.HIT_CHANGED},
    Operation.RESET: _OK | {Outcome.IN_USE},
    Operation.COMMON_PREFIX: _OK | {Outcome.SKIPPED},
}
_FINDING: Final = frozenset(
    (Operation.LOOKUP, Operation.LOOKUP_UNCOUNTED, Operation.LOOKUP_COUNTED_ON_ADMIT, Operation.ADMIT)
)
_TAKING: Final = frozenset((Operation.ADMIT, Operation.ALLOCATE))
_COLUMNS: Final = ("outcomes", "num_hit_tokens", "num_shared_hit_tokens", "num_new_tokens")
_GROUP_COLUMNS: Final = ("num_prefix_blocks", "num_new_blocks")


def check_result(step: Step, result: StepResult, num_groups: int, num_blocks: int, max_model_len: int) -> None:
    """Checks what came as the answer of a step. O(operations + blocks), most of it only where there are hits or blocks.

    Raises:
        ServerError: The step cannot have this result; says where.
    """
    _require(result.sequence == step.sequence, "sequence")
    count = len(step.operations)
    for name in _COLUMNS:
        column = getattr(result, name)
        if column:
            _require(len(column) == count, name)
    for name in _GROUP_COLUMNS:
        column = getattr(result, name)
        if column:
            _require(len(column) == count * num_groups, name)
    if result.block_ids:
        _require(min(result.block_ids) >= 0 and max(result.block_ids) < num_blocks, "block_ids")
    for tokens in (result.num_hit_tokens, result.num_new_tokens):
        _require(not tokens or 0 <= min(tokens) <= max(tokens) <= max_model_len, "tokens")
    if result.outcomes or result.num_hit_tokens or result.num_new_tokens or result.num_shared_hit_tokens:
        _check_rows(step, result)
    _require(_num_taken(step, result, num_groups) == len(result.block_ids), "block_ids")


def _check_rows(step: Step, result: StepResult) -> None:
    operations = step.operations
    zeros = [0] * len(operations)
    outcomes, hits = result.outcomes or zeros, result.num_hit_tokens or zeros
    for i, outcome in enumerate(result.outcomes):
        _require(outcome in _OUTCOMES.get(operations[i], _OK), "outcomes", i)
    for i, hit in enumerate(result.num_hit_tokens):
        _require(not hit or _has_hit(operations[i], outcomes[i]), "num_hit_tokens", i)
    for i, shared in enumerate(result.num_shared_hit_tokens):
        _require(shared <= hits[i], "num_shared_hit_tokens", i)
    for i, new in enumerate(result.num_new_tokens):
        is_admitted = operations[i] == Operation.ADMIT and outcomes[i] == Outcome.OK
        _require(not new or is_admitted, "num_new_tokens", i)


def _num_taken(step: Step, result: StepResult, num_groups: int) -> int:
    """How many block ids the result's counts stand for."""
    hits, new, ids = result.num_prefix_blocks, result.num_new_blocks, result.block_ids
    if not any(hits):
        if not any(new):
            return 0
        if num_groups == 1 and max(new) == 1 and not any(result.outcomes):  # decodes
            _require(0 not in ids, "block_ids")
            for i in [i for i, count in enumerate(new) if count]:
                _require(step.operations[i] in _TAKING, "num_new_blocks", i)
            return sum(new)
    at = 0
    for i, operation in enumerate(step.operations):
        first = i * num_groups
        groups = slice(first, first + num_groups)
        num_hit = 0 if operation == Operation.COMMON_PREFIX else sum(hits[groups])
        num_new = sum(new[groups])
        if num_hit or num_new:
            outcome = result.outcomes[i] if result.outcomes else Outcome.OK
            _require(not num_hit or _has_hit(operation, outcome), "num_prefix_blocks", first)
            _require(not num_new or (operation in _TAKING and outcome == Outcome.OK), "num_new_blocks", first)
            hit_ids, new_ids = ids[at : at + num_hit], ids[at + num_hit : at + num_hit + num_new]
            taken = [*filter(None, hit_ids), *new_ids]
            _require(len(set(taken)) == len(taken) and 0 not in taken, "block_ids", at)
            at += num_hit + num_new
    return at


def _has_hit(operation: int, outcome: int) -> bool:
    if operation == Operation.ALLOCATE:
        return outcome == Outcome.HIT_CHANGED
    return operation in _FINDING and outcome == Outcome.OK


def _require(holds: bool, column: str, i: int | None = None) -> None:  # noqa: FBT001 - a condition
    if not holds:
        message = "the server answered what this step cannot have; is it of another release?"
        raise ServerError("BAD_ANSWER", message, field=column if i is None else f"{column}[{i}]")
