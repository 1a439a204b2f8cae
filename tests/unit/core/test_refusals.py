"""Invalid steps are refused with the field's name, change nothing, and do not count."""

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.core.errors import InvalidArgumentError, KvpoolError, NotFoundError, WrongStateError
from kvpool.core.sessions.session import REMEMBERED_RESULTS, Session
from kvpool.core.steps.columns import MAX_OPERATIONS, Operation, Step
from support.core import World, block_hashes
from support.refusals import refused

LOOKUP, ADMIT, ALLOCATE, APPEND = Operation.LOOKUP, Operation.ADMIT, Operation.ALLOCATE, Operation.APPEND
CACHE, FREE, EVICT, RESET = Operation.CACHE, Operation.FREE, Operation.EVICT, Operation.RESET
HUGE = 2**40

# Request 1 holds the blocks of 13 tokens. Each case: the error, the field, the operations, the columns.
BAD_STEPS: dict[str, tuple[type[KvpoolError], str, list[int], dict[str, Any]]] = {
    "unknown request": (NotFoundError, "request_numbers[0]", [ALLOCATE], {"request_numbers": [9]}),
    "request not declared": (NotFoundError, "request_numbers[0]", [APPEND], {"request_numbers": [2]}),
    "request not declared, with an id": (
        NotFoundError, "request_numbers[0]", [APPEND], {"request_numbers": [2], "request_ids": ["x"]},
    ),
    "number in use": (
        InvalidArgumentError, "request_numbers[0]", [APPEND],
        {"request_numbers": [1], "declares": [True], "request_ids": ["x"]},
    ),
    "id in use": (
        InvalidArgumentError, "request_ids[0]", [APPEND],
        {"request_numbers": [2], "declares": [True], "request_ids": ["r1"]},
    ),
    "id used twice in one step": (
        InvalidArgumentError, "request_ids[1]", [APPEND, APPEND],
        {"request_numbers": [2, 3], "declares": [True, True], "request_ids": ["x", "x"]},
    ),
    "id freed later in the step": (
        InvalidArgumentError, "request_ids[0]", [APPEND, FREE],
        {"request_numbers": [2, 1], "declares": [True, False], "request_ids": ["r1"]},
    ),
    "id freed and used twice in one step": (
        InvalidArgumentError, "request_ids[1]", [FREE, APPEND, APPEND],
        {"request_numbers": [1, 2, 3], "declares": [False, True, True], "request_ids": ["r1", "r1"]},
    ),
    "no number": (
        InvalidArgumentError, "request_numbers[0]", [APPEND], {"declares": [True], "request_ids": ["x"]},
    ),
    "huge number": (
        InvalidArgumentError, "request_numbers[0]", [APPEND],
        {"request_numbers": [2**31], "declares": [True], "request_ids": ["x"]},
    ),
    "no id": (InvalidArgumentError, "request_ids", [APPEND], {"request_numbers": [2], "declares": [True]}),
    "fewer ids than declared requests": (
        InvalidArgumentError, "request_ids", [APPEND, ADMIT],
        {
            "request_numbers": [2, 3], "declares": [True, True], "request_ids": ["x"],
            "num_appended_tokens": [1, 1],
        },
    ),
    "more ids than declared requests": (
        InvalidArgumentError, "request_ids", [APPEND],
        {"request_numbers": [2], "declares": [True], "request_ids": ["x", "y"]},
    ),
    "empty id": (
        InvalidArgumentError, "request_ids[0]", [APPEND],
        {"request_numbers": [2], "declares": [True], "request_ids": [""]},
    ),
    "column of declarations too short": (
        InvalidArgumentError, "declares", [APPEND, ALLOCATE],
        {"request_numbers": [2, 1], "declares": [True], "request_ids": ["x"], "num_new_tokens": [0, 1]},
    ),
    "column of declarations too long": (
        InvalidArgumentError, "declares", [APPEND],
        {"request_numbers": [2], "declares": [True, False], "request_ids": ["x"]},
    ),
    "column of declarations without operations": (InvalidArgumentError, "declares", [], {"declares": [False]}),
    "too few LoRA names": (
        InvalidArgumentError, "lora_names", [APPEND, APPEND],
        {
            "request_numbers": [2, 3], "declares": [True, True], "request_ids": ["x", "y"],
            "lora_names": ["l"],
        },
    ),
    "negative growth": (
        InvalidArgumentError, "num_appended_tokens[0]", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [1], "num_appended_tokens": [-1]},
    ),
    "huge growth": (
        InvalidArgumentError, "num_appended_tokens[0]", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [1], "num_appended_tokens": [HUGE]},
    ),
    "nothing to allocate": (InvalidArgumentError, "num_new_tokens[0]", [ALLOCATE], {"request_numbers": [1]}),
    "negative allocation": (
        InvalidArgumentError, "num_new_tokens[0]", [ALLOCATE], {"request_numbers": [1], "num_new_tokens": [-1]},
    ),
    "huge allocation": (
        InvalidArgumentError, "num_new_tokens[0]", [ALLOCATE], {"request_numbers": [1], "num_new_tokens": [HUGE]},
    ),
    "allocation past the longest request": (
        InvalidArgumentError, "num_new_tokens[0]", [ALLOCATE], {"request_numbers": [1], "num_new_tokens": [256]},
    ),
    "huge look-ahead": (
        InvalidArgumentError, "num_lookahead_tokens[0]", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [1], "num_lookahead_tokens": [HUGE]},
    ),
    "more rejected than computed": (
        InvalidArgumentError, "num_rejected_tokens[0]", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [1], "num_rejected_tokens": [14]},
    ),
    "look-up of a running request": (WrongStateError, "request_numbers[0]", [LOOKUP], {"request_numbers": [1]}),
    "admission of a running request": (WrongStateError, "request_numbers[0]", [ADMIT], {"request_numbers": [1]}),
    "hit for a running request": (
        WrongStateError, "request_numbers[0]", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [1], "num_block_ids": [1], "block_ids": [1]},
    ),
    "admission of nothing": (
        InvalidArgumentError, "num_appended_tokens[0]", [ADMIT],
        {"request_numbers": [2], "declares": [True], "request_ids": ["x"]},
    ),
    "cached past what is computed": (
        InvalidArgumentError, "num_new_tokens[0]", [CACHE], {"request_numbers": [1], "num_new_tokens": [14]},
    ),
    "hash too short": (
        InvalidArgumentError, "block_hashes", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [3], "num_appended_tokens": [3], "block_hashes": b"h" * 31},
    ),
    "hash missing": (
        InvalidArgumentError, "block_hashes", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [3], "num_appended_tokens": [3]},
    ),
    "hash too many": (
        InvalidArgumentError, "block_hashes", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [3], "num_appended_tokens": [3], "block_hashes": b"h" * 64},
    ),
    "tokens to a pool without events": (
        InvalidArgumentError, "token_ids", [ALLOCATE],
        {"request_numbers": [1], "num_new_tokens": [1], "num_appended_tokens": [1], "token_ids": [5]},
    ),
    "hit with a block outside the pool": (
        InvalidArgumentError, "block_ids[0]", [ALLOCATE],
        {
            "request_numbers": [2], "declares": [True], "request_ids": ["x"], "num_appended_tokens": [5],
            "block_hashes": block_hashes("a", 1), "num_new_tokens": [1], "num_block_ids": [1], "block_ids": [20],
        },
    ),
    "hit of the whole request": (
        InvalidArgumentError, "num_block_ids[0]", [ALLOCATE],
        {
            "request_numbers": [2], "declares": [True], "request_ids": ["x"], "num_appended_tokens": [4],
            "block_hashes": block_hashes("a", 1), "num_new_tokens": [1], "num_block_ids": [1], "block_ids": [1],
        },
    ),
    "eviction of the null block": (
        InvalidArgumentError, "block_ids[0]", [EVICT], {"num_block_ids": [1], "block_ids": [0]},
    ),
    "fewer ids than counted": (
        InvalidArgumentError, "num_block_ids[0]", [EVICT], {"num_block_ids": [2], "block_ids": [1]},
    ),
    "evicting more blocks than there are": (
        InvalidArgumentError, "num_block_ids[1]", [EVICT, EVICT],
        {"num_block_ids": [20, 21], "block_ids": [1] * 41},
    ),
    "negative count of ids": (
        InvalidArgumentError, "num_block_ids[0]", [EVICT], {"num_block_ids": [-1], "block_ids": [1]},
    ),
    "more ids than counted": (
        InvalidArgumentError, "block_ids", [EVICT], {"num_block_ids": [1], "block_ids": [1, 2]},
    ),
    "ids for what takes none": (
        InvalidArgumentError, "num_block_ids[0]", [FREE],
        {"request_numbers": [1], "num_block_ids": [1], "block_ids": [1]},
    ),
    "request of a reset": (InvalidArgumentError, "request_numbers[0]", [RESET], {"request_numbers": [1]}),
    "no operation": (InvalidArgumentError, "operations[0]", [0], {}),
    "unknown operation": (InvalidArgumentError, "operations[0]", [99], {}),
    "too many operations": (InvalidArgumentError, "operations", [RESET] * (MAX_OPERATIONS + 1), {}),
    "column too short": (
        InvalidArgumentError, "num_new_tokens", [ALLOCATE, RESET],
        {"request_numbers": [1, 0], "num_new_tokens": [1]},
    ),
    "column of ids too short": (InvalidArgumentError, "num_block_ids", [EVICT, EVICT], {"num_block_ids": [0]}),
    "negative budget": (InvalidArgumentError, "admission_budget_tokens", [], {"admission_budget_tokens": -1}),
    "execution of what was not sent": (InvalidArgumentError, "executed_sequence", [], {"executed_sequence": 2}),
    "bad after good": (
        NotFoundError, "request_numbers[2]", [ALLOCATE, ADMIT, FREE],
        {
            "request_numbers": [1, 2, 9], "declares": [False, True, False], "request_ids": ["x"],
            "num_appended_tokens": [0, 1, 0], "num_new_tokens": [1, 0, 0],
        },
    ),
}  # fmt: skip


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def session(world: World) -> Session:
    session = world.open()
    world.admit(session, 1, "abc", 13)
    return session


@pytest.mark.parametrize("case", BAD_STEPS)
def test_an_invalid_step_is_refused_as_a_whole(case: str, world: World, session: Session) -> None:
    kind, field, operations, columns = BAD_STEPS[case]
    before = world.snapshot()
    with pytest.raises(KvpoolError) as caught:
        world.apply(session, Step(2, operations=operations, **columns))
    assert (type(caught.value), caught.value.field) == (kind, field)
    assert world.snapshot() == before
    good = world.allocate(session, 1, 4)
    assert good.block_ids == [5]


@pytest.mark.parametrize(
    ("sequence", "kind", "reason"),
    [
        (0, InvalidArgumentError, "INVALID_VALUE"),
        (REMEMBERED_RESULTS + 4, WrongStateError, "SEQUENCE_GAP"),
        (2, WrongStateError, "SEQUENCE_FORGOTTEN"),
        (REMEMBERED_RESULTS + 1, InvalidArgumentError, "SEQUENCE_REUSED"),
    ],
)
def test_a_step_out_of_sequence_is_refused(
    sequence: int, kind: type[KvpoolError], reason: str, world: World, session: Session
) -> None:
    for _ in range(REMEMBERED_RESULTS + 1):
        world.allocate(session, 1, 1)
    with world.refuses(kind, reason=reason):
        world.apply(session, Step(sequence, operations=[RESET]))


def test_a_step_sent_again_gets_the_same_result_and_changes_nothing(world: World, session: Session) -> None:
    step = Step(2, operations=[ALLOCATE], request_numbers=[1], num_new_tokens=[5])
    first = world.apply(session, step)
    before = world.snapshot()
    assert world.apply(session, step) is first
    assert world.pool.activity.retries == 1
    world.pool.activity.retries = 0
    assert world.snapshot() == before


def test_a_session_cannot_name_requests_of_another_session(world: World, session: Session) -> None:
    other = world.open()
    before = world.snapshot()
    for operation in (FREE, Operation.PREEMPT, ALLOCATE, Operation.COMMON_PREFIX):
        with pytest.raises(NotFoundError):
            world.run(other, operation, request_numbers=[1], num_new_tokens=[1])
    assert world.snapshot() == before
    assert session.requests


def test_unknown_pools_and_sessions_change_nothing(world: World) -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: world.allocator.pools.get("x"), "pool_name"),
        (lambda: world.allocator.sessions.find("x", 0.0), "session_id"),
        (lambda: world.allocator.close_session("x", 0.0), "session_id"),
    ]
    before = world.snapshot()
    for call, field in calls:
        with refused(KvpoolError, field=field):
            call()
    assert world.snapshot() == before
