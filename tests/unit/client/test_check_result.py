"""Results that a step cannot have, each by the field that gives it away."""

import pytest

from kvpool.client.check_result import check_result
from kvpool.client.errors import ServerError
from kvpool.core.steps.columns import Operation, Outcome, Step, StepResult

STEP = Step(7, operations=[Operation.ADD, Operation.ADMIT, Operation.ALLOCATE, Operation.FREE])
GOOD = {"num_hit_tokens": [0, 4, 0, 0], "num_prefix_blocks": [0, 1, 0, 0], "num_new_blocks": [0, 2, 1, 0]}


def check(**fields: object) -> None:
    result = StepResult(**{"sequence": 7, **GOOD, "block_ids": [3, 4, 5, 6], **fields})  # type: ignore[arg-type]
    check_result(STEP, result, num_groups=1, num_blocks=10, max_model_len=64)


def test_what_the_step_can_have_is_let_through() -> None:
    check()
    check(block_ids=[0, 4, 5, 6])  # the hit's: null where nothing is needed
    check_result(STEP, StepResult(7), num_groups=1, num_blocks=10, max_model_len=64)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("sequence", 8, "sequence"),
        ("outcomes", [0], "outcomes"),
        ("outcomes", [0, 0, 0, Outcome.NO_BLOCKS], "outcomes[3]"),
        ("outcomes", [0, 0, 99, 0], "outcomes[2]"),
        ("num_hit_tokens", [0, 65, 0, 0], "tokens"),
        ("num_hit_tokens", [4, 4, 0, 0], "num_hit_tokens[0]"),
        ("num_shared_hit_tokens", [0, 5, 0, 0], "num_shared_hit_tokens[1]"),
        ("num_new_tokens", [0, 0, 1, 0], "num_new_tokens[2]"),
        ("num_prefix_blocks", [0, 0, 1, 0], "num_prefix_blocks[2]"),
        ("num_new_blocks", [0, 2, 0, 1], "num_new_blocks[3]"),
        ("num_new_blocks", [0, 2, 1], "num_new_blocks"),
        ("block_ids", [3, 4, 5], "block_ids"),
        ("block_ids", [3, 4, 5, 6, 7], "block_ids"),
        ("block_ids", [3, 4, 5, 10], "block_ids"),
        ("block_ids", [3, 3, 5, 6], "block_ids[0]"),
        ("block_ids", [3, 0, 5, 6], "block_ids[0]"),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(field: str, value: object, told: str) -> None:
    with pytest.raises(ServerError) as caught:
        check(**{field: value})
    assert (caught.value.reason, caught.value.field) == ("BAD_ANSWER", told)


def test_any_operation_that_looks_for_blocks_can_be_skipped() -> None:
    looking = [
        Operation.LOOKUP,
        Operation.LOOKUP_UNCOUNTED,
        Operation.ADMIT,
        Operation.ALLOCATE,
        Operation.COMMON_PREFIX,
    ]
    skipped = StepResult(7, outcomes=[Outcome.SKIPPED] * len(looking))
    check_result(Step(7, operations=[*looking]), skipped, num_groups=1, num_blocks=10, max_model_len=64)
