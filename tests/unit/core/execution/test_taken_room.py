"""Room that a request took without asking: told with the next operation, never more than there was."""

from typing import Any

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import RequestNumber, StepNumber
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Outcome
from support.core import STEP, World, block_hashes
from support.integrity import check_integrity

ADD, LOOKUP, ADMIT, ALLOCATE = Operation.ADD, Operation.LOOKUP, Operation.ADMIT, Operation.ALLOCATE
CACHE, FREE, PREEMPT, APPEND = Operation.CACHE, Operation.FREE, Operation.PREEMPT, Operation.APPEND
EVICT, RESET = Operation.EVICT, Operation.RESET
HUGE = 2**40

# Request 1 holds the blocks of 13 tokens, which leaves room for 3 more; 2 holds none. Each case: the field, the
# operations, the columns.
BAD_STEPS: dict[str, tuple[str, list[Operation], dict[str, Any]]] = {
    "more taken than there is room": (
        "num_taken_tokens[0]", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [1], "num_taken_tokens": [4]},
    ),
    "more taken than there is room, beside rejected ones": (
        "num_taken_tokens[0]", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [1], "num_taken_tokens": [4], "num_rejected_tokens": [2]},
    ),
    "more taken than there is room, to be freed": (
        "num_taken_tokens[1]", [ALLOCATE, FREE],
        {"request_numbers": [2, 1], "num_new_tokens": [1, 0], "num_taken_tokens": [0, 4]},
    ),
    "negative room taken": (
        "num_taken_tokens[0]", [CACHE], {"request_numbers": [1], "num_taken_tokens": [-1]},
    ),
    "negative room taken by a decode": (
        "num_taken_tokens[0]", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [1], "num_taken_tokens": [-1]},
    ),
    "huge room taken": (
        "num_taken_tokens[0]", [APPEND],
        {"request_numbers": [1], "num_taken_tokens": [HUGE]},
    ),
    "room taken after an allocation of the same step": (
        "num_taken_tokens[1]", [ALLOCATE, APPEND],
        {"request_numbers": [1, 1], "num_new_tokens": [1, 0], "num_taken_tokens": [0, 1]},
    ),
    "room taken twice": (
        "num_taken_tokens[1]", [APPEND, FREE],
        {"request_numbers": [1, 1], "num_taken_tokens": [1, 1]},
    ),
    "room taken after a preemption": (
        "num_taken_tokens[1]", [PREEMPT, APPEND],
        {"request_numbers": [1, 1], "num_taken_tokens": [0, 1]},
    ),
    "room taken by a new request": (
        "num_taken_tokens[0]", [ADD],
        {"request_numbers": [3], "request_ids": ["x"], "num_taken_tokens": [1]},
    ),
    "room taken by a request that the step admits": (
        "num_taken_tokens[1]", [ADD, ADMIT],
        {
            "request_numbers": [3, 3], "request_ids": ["x"], "num_appended_tokens": [2, 0],
            "num_taken_tokens": [0, 1],
        },
    ),
    "room taken by a request without blocks": (
        "num_taken_tokens[0]", [LOOKUP], {"request_numbers": [2], "num_taken_tokens": [1]},
    ),
    "allocation of a request without blocks that took room": (
        "num_taken_tokens[0]", [ALLOCATE],
        {"request_numbers": [2], "num_new_tokens": [1], "num_taken_tokens": [1]},
    ),
    "room taken by an eviction": (
        "request_numbers[0]", [EVICT],
        {"num_taken_tokens": [1], "num_block_ids": [1], "block_ids": [1]},
    ),
    "room taken by a reset": ("request_numbers[0]", [RESET], {"num_taken_tokens": [1]}),
    "column of taken room too short": (
        "num_taken_tokens", [ALLOCATE, FREE],
        {"request_numbers": [1, 1], "num_new_tokens": [1, 0], "num_taken_tokens": [1]},
    ),
    "allocation past the longest request, after room taken": (
        "num_new_tokens[0]", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [242], "num_taken_tokens": [2]},
    ),
}  # fmt: skip


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def session(world: World) -> Session:
    session = world.open()
    world.admit(session, 1, "abc", 13)
    world.run(session, ADD, request_numbers=[2], num_appended_tokens=[3], request_ids=["waiting"])
    return session


@pytest.mark.parametrize("case", BAD_STEPS)
def test_what_was_not_there_to_take_is_refused(case: str, world: World, session: Session) -> None:
    field, operations, columns = BAD_STEPS[case]
    before = world.snapshot()
    with pytest.raises(InvalidArgumentError) as caught:
        world.run(session, *operations, **columns, num_credit_allocations=7)
    assert caught.value.field == field
    assert world.snapshot() == before
    check_integrity(world.pool, world.sessions())


# Each case: the operation that tells of 2 tokens, and its columns.
TELLING: dict[str, tuple[Operation, dict[str, Any]]] = {
    "a decode": (
        ALLOCATE,
        {"num_appended_tokens": [3], "num_new_tokens": [1], "block_hashes": block_hashes("abcd", 4)[-32:]},
    ),
    "an allocation that looks ahead": (ALLOCATE, {"num_new_tokens": [5], "num_lookahead_tokens": [3]}),
    "an allocation after a rejection": (ALLOCATE, {"num_new_tokens": [1], "num_rejected_tokens": [1]}),
    "growth": (APPEND, {"num_appended_tokens": [2]}),
    "caching": (CACHE, {"num_new_tokens": [15]}),
    "a preemption": (PREEMPT, {}),
    "the end": (FREE, {}),
    "a count of common blocks": (Operation.COMMON_PREFIX, {}),
}


def running_world() -> tuple[World, Session]:
    world = World()
    session = world.open()
    world.admit(session, 1, "abc", 13)
    return world, session


@pytest.mark.parametrize("case", TELLING)
def test_what_was_taken_counts_as_if_it_had_been_asked_for(case: str) -> None:
    operation, columns = TELLING[case]
    telling, teller = running_world()
    told = telling.run(
        teller, operation, request_numbers=[1], num_taken_tokens=[2], num_credit_allocations=2, **columns
    )  # fmt: skip
    asking, asker = running_world()
    for _ in range(2):
        asking.run(asker, ALLOCATE, request_numbers=[1], num_new_tokens=[1])
    asked = asking.run(asker, operation, request_numbers=[1], **columns)
    assert (told.outcomes, told.block_ids, told.free_blocks) == (asked.outcomes, asked.block_ids, asked.free_blocks)
    assert told.num_prefix_blocks == asked.num_prefix_blocks
    assert telling.pool.activity.allocations == asking.pool.activity.allocations
    for world, session in ((telling, teller), (asking, asker)):
        check_integrity(world.pool, world.sessions())
        # Steps are counted, and blocks that wait to be said to be executed tell theirs.
        session.sequence = session.executed_sequence = STEP
        for request in session.requests.values():
            request.filling_sequence = STEP
        world.pool.blocks.prefix_map.publish(session.session_number, StepNumber(9))
        world.pool.activity.steps = world.pool.activity.operations = 0
    assert telling.snapshot() == asking.snapshot()


def test_room_is_told_of_for_several_requests_at_once(world: World, session: Session) -> None:
    world.admit(session, 3, "xy", 9)
    world.run(
        session, ALLOCATE, APPEND, ALLOCATE, request_numbers=[1, 3, 2], num_appended_tokens=[0, 0, 0],
        num_new_tokens=[1, 0, 1], num_taken_tokens=[2, 1, 0], num_lookahead_tokens=[0, 0, 1],
    )  # fmt: skip
    assert [computed_tokens(session, number) for number in (1, 3, 2)] == [16, 10, 1]


def test_what_was_taken_stays_taken_though_no_blocks_were_found() -> None:
    """Rule 3 of apply: the scheduler need not say it again with its next try."""
    world = World(num_blocks=3)
    session = world.open()
    world.admit(session, 1, "a", 6)
    result = world.run(session, ALLOCATE, request_numbers=[1], num_new_tokens=[2], num_taken_tokens=[1])
    assert (result.outcomes, computed_tokens(session, 1)) == ([Outcome.NO_BLOCKS], 7)
    with pytest.raises(InvalidArgumentError):
        world.run(session, APPEND, request_numbers=[1], num_taken_tokens=[2])


def test_what_was_taken_can_be_rejected(world: World, session: Session) -> None:
    world.run(session, APPEND, request_numbers=[1], num_taken_tokens=[2], num_rejected_tokens=[15])
    assert computed_tokens(session, 1) == 0


def test_quiet_allocations_change_statistics_alone(world: World, session: Session) -> None:
    before, allocations = world.snapshot(), world.pool.activity.allocations
    for wrong in (-1, 2**24 + 1):
        with pytest.raises(InvalidArgumentError, match="num_credit_allocations"):
            world.run(session, num_credit_allocations=wrong)
        assert world.snapshot() == before
    world.run(session, num_credit_allocations=2**24)
    activity = world.pool.activity
    assert activity.allocations == allocations + 2**24
    activity.allocations, activity.steps, session.sequence = allocations, activity.steps - 1, StepNumber(2)
    assert world.snapshot() == before


def computed_tokens(session: Session, number: int) -> int:
    return session.by_number[RequestNumber(number)].num_computed_tokens
