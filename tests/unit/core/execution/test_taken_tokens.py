"""Tokens taken on credit: reported with the next operation, and limited by the credit of the request."""

from typing import Any

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import RequestNumber, StepNumber
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Outcome
from support.core import STEP, World, block_hashes, opened

LOOKUP, ADMIT, ALLOCATE = Operation.LOOKUP, Operation.ADMIT, Operation.ALLOCATE
CACHE, FREE, PREEMPT, APPEND = Operation.CACHE, Operation.FREE, Operation.PREEMPT, Operation.APPEND
EVICT, RESET = Operation.EVICT, Operation.RESET
HUGE = 2**40

RUNNING: dict[str, Any] = {"request_numbers": [1], "num_new_tokens": [1]}


def bad(field: str, *operations: Operation, **columns: Any) -> tuple[str, tuple[Operation, ...], dict[str, Any]]:
    return field, operations, columns


# Request 1 holds the blocks of 13 tokens, and has credit for 2 more: the third would fill a block. Request 2 holds no
# blocks. Each case: the field at fault, the operations, the columns.
BAD_STEPS = {
    "a block filled on credit": bad("num_taken_tokens[0]", ALLOCATE, **RUNNING, num_taken_tokens=[3]),
    "more tokens taken than free slots": bad("num_taken_tokens[0]", ALLOCATE, **RUNNING, num_taken_tokens=[4]),
    "more tokens taken than free slots, and some rejected": bad(
        "num_taken_tokens[0]", ALLOCATE, **RUNNING, num_taken_tokens=[4], num_rejected_tokens=[2]
    ),
    "more tokens taken than free slots, by a request to be freed": bad(
        "num_taken_tokens[1]", ALLOCATE, FREE, request_numbers=[2, 1], num_new_tokens=[1, 0], num_taken_tokens=[0, 4]
    ),
    "negative tokens taken": bad("num_taken_tokens[0]", CACHE, request_numbers=[1], num_taken_tokens=[-1]),
    "negative tokens taken by a decode": bad("num_taken_tokens[0]", ALLOCATE, **RUNNING, num_taken_tokens=[-1]),
    "a huge number of tokens taken": bad("num_taken_tokens[0]", APPEND, request_numbers=[1], num_taken_tokens=[HUGE]),
    "tokens taken by a new request": bad(
        "num_taken_tokens[0]", APPEND, request_numbers=[3], request_ids=["x"], num_taken_tokens=[1]
    ),
    "tokens taken by a request that the step admits": bad(
        "num_taken_tokens[0]",
        ADMIT,
        request_numbers=[3],
        request_ids=["x"],
        num_appended_tokens=[2],
        num_taken_tokens=[1],
    ),
    "tokens taken by a request without blocks": bad(
        "num_taken_tokens[0]", LOOKUP, request_numbers=[2], num_taken_tokens=[1]
    ),
    "allocation of a request without blocks that took tokens": bad(
        "num_taken_tokens[0]", ALLOCATE, request_numbers=[2], num_new_tokens=[1], num_taken_tokens=[1]
    ),
    "tokens taken by an eviction": bad(
        "request_numbers[0]", EVICT, num_taken_tokens=[1], num_block_ids=[1], block_ids=[1]
    ),
    "tokens taken by a reset": bad("request_numbers[0]", RESET, num_taken_tokens=[1]),
    "column of taken tokens too short": bad(
        "num_taken_tokens", ALLOCATE, FREE, request_numbers=[1, 2], num_new_tokens=[1, 0], num_taken_tokens=[1]
    ),
    "allocation beyond max_model_len, after tokens taken": bad(
        "num_new_tokens[0]", ALLOCATE, request_numbers=[1], num_new_tokens=[242], num_taken_tokens=[2]
    ),
}


@pytest.fixture
def session(world: World) -> Session:
    session = world.open()
    world.admit(session, 1, "abc", 13)
    world.run(session, APPEND, request_numbers=[2], num_appended_tokens=[3], request_ids=["waiting"])
    return session


@pytest.mark.parametrize("case", BAD_STEPS)
def test_taken_tokens_beyond_the_credit_are_refused(case: str, world: World, session: Session) -> None:
    field, operations, columns = BAD_STEPS[case]
    with world.refuses(field=field):
        world.run(session, *operations, **columns, num_credit_allocations=7)


# Each case: the operation that reports 2 taken tokens, and its columns.
REPORTS: dict[str, tuple[Operation, dict[str, Any]]] = {
    "a decode": (
        ALLOCATE,
        {"num_appended_tokens": [3], "num_new_tokens": [1], "block_hashes": block_hashes("abcd", 4)[-32:]},
    ),
    "an allocation with lookahead": (ALLOCATE, {"num_new_tokens": [5], "num_lookahead_tokens": [3]}),
    "an allocation after a rejection": (ALLOCATE, {"num_new_tokens": [1], "num_rejected_tokens": [1]}),
    "an append": (APPEND, {"num_appended_tokens": [2]}),
    "caching": (CACHE, {"num_new_tokens": [15]}),
    "a preemption": (PREEMPT, {}),
    "a free": (FREE, {}),
    "a count of common blocks": (Operation.COMMON_PREFIX, {}),
}


def running_world() -> tuple[World, Session]:
    world, session = opened()
    world.admit(session, 1, "abc", 13)
    return world, session


@pytest.mark.parametrize("case", REPORTS)
def test_taken_tokens_count_like_allocated_tokens(case: str) -> None:
    operation, columns = REPORTS[case]
    reporting, reporter = running_world()
    reported = reporting.run(
        reporter, operation, request_numbers=[1], num_taken_tokens=[2], num_credit_allocations=2, **columns
    )  # fmt: skip
    asking, asker = running_world()
    for _ in range(2):
        asking.run(asker, ALLOCATE, request_numbers=[1], num_new_tokens=[1])
    asked = asking.run(asker, operation, request_numbers=[1], **columns)
    assert (reported.outcomes, reported.block_ids, reported.free_blocks) == (
        asked.outcomes,
        asked.block_ids,
        asked.free_blocks,
    )
    assert reported.num_prefix_blocks == asked.num_prefix_blocks
    assert reporting.pool.activity.allocations == asking.pool.activity.allocations
    for world, session in ((reporting, reporter), (asking, asker)):
        # The numbers of steps differ, also in blocks that wait for the report of their execution.
        session.sequence = session.executed_sequence = STEP
        for request in session.requests.values():
            request.filling_sequence = STEP
        world.pool.blocks.prefix_map.pending.publish(session.session_number, StepNumber(9))
        activity = world.pool.activity
        activity.steps = activity.operations = activity.waits_exact = 0
    assert reporting.snapshot() == asking.snapshot()


def test_taken_tokens_are_kept_when_the_operation_finds_too_few_blocks() -> None:
    """Rule 3 of apply.py: the scheduler does not repeat them when it retries."""
    world, session = opened(num_blocks=3)
    world.admit(session, 1, "a", 6)
    result = world.allocate(session, 1, 2, num_taken_tokens=[1])
    assert (result.outcomes, computed_tokens(session, 1)) == ([Outcome.NEVER_FITS], 7)
    with pytest.raises(InvalidArgumentError):
        world.run(session, APPEND, request_numbers=[1], num_taken_tokens=[2])


def test_blocks_of_one_token_are_never_filled_on_credit() -> None:
    """A decode would also fill the slot of an allocated look-ahead token, and so its block."""
    world, session = opened(block_size=1)
    world.run(
        session, ADMIT, request_numbers=[1], num_appended_tokens=[3], num_lookahead_tokens=[2],
        block_hashes=block_hashes("abc", 3), request_ids=["r1"],
    )  # fmt: skip
    with world.refuses(match=r"num_taken_tokens\[0\]: 1 is not in \[0, 0\]"):
        world.allocate(session, 1, 1, num_taken_tokens=[1])


def test_allocations_on_credit_change_only_statistics(world: World, session: Session) -> None:
    before, allocations = world.snapshot(), world.pool.activity.allocations
    for wrong in (-1, 2**24 + 1):
        with world.refuses(match="num_credit_allocations"):
            world.run(session, num_credit_allocations=wrong)
    world.run(session, num_credit_allocations=2**24)
    activity = world.pool.activity
    assert activity.allocations == allocations + 2**24
    activity.allocations, activity.steps, session.sequence = allocations, activity.steps - 1, StepNumber(2)
    activity.waits_exact -= 1
    assert world.snapshot() == before


def computed_tokens(session: Session, number: int) -> int:
    return session.by_number[RequestNumber(number)].num_computed_tokens
