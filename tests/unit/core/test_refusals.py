"""Invalid steps are refused with the field's name, change nothing, and do not count."""

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.core.errors import InvalidArgumentError, KvpoolError, NotFoundError, WrongStateError
from kvpool.core.sessions.session import REMEMBERED_RESULTS, Session
from kvpool.core.steps.columns import MAX_OPERATIONS, Operation, Step
from support.core import World, block_hashes

LOOKUP, ADMIT, ALLOCATE, APPEND = Operation.LOOKUP, Operation.ADMIT, Operation.ALLOCATE, Operation.APPEND
CACHE, FREE, EVICT, RESET = Operation.CACHE, Operation.FREE, Operation.EVICT, Operation.RESET
HUGE = 2**40

Bad = tuple[type[KvpoolError], str, list[int], dict[str, Any]]
RUNNING: dict[str, Any] = {"numbers": [1]}
NEW: dict[str, Any] = {"numbers": [2], "declares": [True], "ids": ["x"]}
COLUMNS = {
    "numbers": "request_numbers",
    "ids": "request_ids",
    "appended": "num_appended_tokens",
    "new": "num_new_tokens",
    "hashes": "block_hashes",
    "counts": "num_block_ids",
    "blocks": "block_ids",
}


def bad(field: str, *operations: int, kind: type[KvpoolError] = InvalidArgumentError, **columns: Any) -> Bad:
    """A step, with some columns by short names, and the field at fault in its error."""
    return kind, field, list(operations), {COLUMNS.get(name, name): column for name, column in columns.items()}


# Request 1 holds the blocks of 13 tokens.
BAD_STEPS = {
    "unknown request": bad("request_numbers[0]", ALLOCATE, kind=NotFoundError, numbers=[9]),
    "request not declared": bad("request_numbers[0]", APPEND, kind=NotFoundError, numbers=[2]),
    "request not declared, with an id": bad("request_numbers[0]", APPEND, kind=NotFoundError, numbers=[2], ids=["x"]),
    "number in use": bad("request_numbers[0]", APPEND, **RUNNING, declares=[True], ids=["x"]),
    "id in use": bad("request_ids[0]", APPEND, numbers=[2], declares=[True], ids=["r1"]),
    "id used twice in one step": bad(
        "request_ids[1]", APPEND, APPEND, numbers=[2, 3], declares=[True, True], ids=["x", "x"]
    ),
    "id freed later in the step": bad(
        "request_ids[0]", APPEND, FREE, numbers=[2, 1], declares=[True, False], ids=["r1"]
    ),
    "id freed and used twice in one step": bad(
        "request_ids[1]", FREE, APPEND, APPEND, numbers=[1, 2, 3], declares=[False, True, True], ids=["r1", "r1"]
    ),
    "no number": bad("request_numbers[0]", APPEND, declares=[True], ids=["x"]),
    "huge number": bad("request_numbers[0]", APPEND, numbers=[2**31], declares=[True], ids=["x"]),
    "no id": bad("request_ids", APPEND, numbers=[2], declares=[True]),
    "fewer ids than declared requests": bad(
        "request_ids", APPEND, ADMIT, numbers=[2, 3], declares=[True, True], ids=["x"], appended=[1, 1]
    ),
    "more ids than declared requests": bad("request_ids", APPEND, numbers=[2], declares=[True], ids=["x", "y"]),
    "empty id": bad("request_ids[0]", APPEND, numbers=[2], declares=[True], ids=[""]),
    "column of declarations too short": bad(
        "declares", APPEND, ALLOCATE, numbers=[2, 1], declares=[True], ids=["x"], new=[0, 1]
    ),
    "column of declarations too long": bad("declares", APPEND, numbers=[2], declares=[True, False], ids=["x"]),
    "column of declarations without operations": bad("declares", declares=[False]),
    "too few LoRA names": bad(
        "lora_names", APPEND, APPEND, numbers=[2, 3], declares=[True, True], ids=["x", "y"], lora_names=["l"]
    ),
    "negative growth": bad("num_appended_tokens[0]", ALLOCATE, **RUNNING, new=[1], appended=[-1]),
    "huge growth": bad("num_appended_tokens[0]", ALLOCATE, **RUNNING, new=[1], appended=[HUGE]),
    "nothing to allocate": bad("num_new_tokens[0]", ALLOCATE, **RUNNING),
    "negative allocation": bad("num_new_tokens[0]", ALLOCATE, **RUNNING, new=[-1]),
    "huge allocation": bad("num_new_tokens[0]", ALLOCATE, **RUNNING, new=[HUGE]),
    "allocation past the longest request": bad("num_new_tokens[0]", ALLOCATE, **RUNNING, new=[256]),
    "huge look-ahead": bad("num_lookahead_tokens[0]", ALLOCATE, **RUNNING, new=[1], num_lookahead_tokens=[HUGE]),
    "huge encoder": bad("num_encoder_tokens[0]", ALLOCATE, **RUNNING, new=[1], num_encoder_tokens=[2**31]),
    "more rejected than computed": bad(
        "num_rejected_tokens[0]", ALLOCATE, **RUNNING, new=[1], num_rejected_tokens=[14]
    ),
    "look-up of a running request": bad("request_numbers[0]", LOOKUP, kind=WrongStateError, **RUNNING),
    "admission of a running request": bad("request_numbers[0]", ADMIT, kind=WrongStateError, **RUNNING),
    "hit for a running request": bad(
        "request_numbers[0]", ALLOCATE, kind=WrongStateError, **RUNNING, new=[1], counts=[1], blocks=[1]
    ),
    "admission of nothing": bad("num_appended_tokens[0]", ADMIT, **NEW),
    "cached past what is computed": bad("num_new_tokens[0]", CACHE, **RUNNING, new=[14]),
    "hash too short": bad("block_hashes", ALLOCATE, **RUNNING, new=[3], appended=[3], hashes=b"h" * 31),
    "hash missing": bad("block_hashes", ALLOCATE, **RUNNING, new=[3], appended=[3]),
    "hash too many": bad("block_hashes", ALLOCATE, **RUNNING, new=[3], appended=[3], hashes=b"h" * 64),
    "tokens to a pool without events": bad("token_ids", ALLOCATE, **RUNNING, new=[1], appended=[1], token_ids=[5]),
    "hit with a block outside the pool": bad(
        "block_ids[0]", ALLOCATE, **NEW, appended=[5], hashes=block_hashes("a", 1), new=[1], counts=[1], blocks=[20]
    ),
    "hit of the whole request": bad(
        "num_block_ids[0]", ALLOCATE, **NEW, appended=[4], hashes=block_hashes("a", 1), new=[1], counts=[1], blocks=[1]
    ),
    "eviction of the null block": bad("block_ids[0]", EVICT, counts=[1], blocks=[0]),
    "fewer ids than counted": bad("num_block_ids[0]", EVICT, counts=[2], blocks=[1]),
    "evicting more blocks than there are": bad("num_block_ids[1]", EVICT, EVICT, counts=[20, 21], blocks=[1] * 41),
    "negative count of ids": bad("num_block_ids[0]", EVICT, counts=[-1], blocks=[1]),
    "more ids than counted": bad("block_ids", EVICT, counts=[1], blocks=[1, 2]),
    "ids for what takes none": bad("num_block_ids[0]", FREE, **RUNNING, counts=[1], blocks=[1]),
    "request of a reset": bad("request_numbers[0]", RESET, **RUNNING),
    "no operation": bad("operations[0]", 0),
    "unknown operation": bad("operations[0]", 99),
    "too many operations": bad("operations", *([RESET] * (MAX_OPERATIONS + 1))),
    "column too short": bad("num_new_tokens", ALLOCATE, RESET, numbers=[1, 0], new=[1]),
    "column of ids too short": bad("num_block_ids", EVICT, EVICT, counts=[0]),
    "negative budget": bad("admission_budget_tokens", admission_budget_tokens=-1),
    "negative time of copies": bad("copying_in_microseconds", copying_in_microseconds=-1),
    "negative limit of promoted blocks": bad("max_promoted_blocks", max_promoted_blocks=-1),
    "execution of what was not sent": bad("executed_sequence", executed_sequence=2),
    "bad after good": bad(
        "request_numbers[2]",
        ALLOCATE,
        ADMIT,
        FREE,
        kind=NotFoundError,
        numbers=[1, 2, 9],
        declares=[False, True, False],
        ids=["x"],
        appended=[0, 1, 0],
        new=[1, 0, 0],
    ),
}


@pytest.fixture
def session(world: World) -> Session:
    session = world.open()
    world.admit(session, 1, "abc", 13)
    return session


@pytest.mark.parametrize("case", BAD_STEPS)
def test_an_invalid_step_is_refused_as_a_whole(case: str, world: World, session: Session) -> None:
    kind, field, operations, columns = BAD_STEPS[case]
    with world.refuses(kind, field=field) as caught:
        world.apply(session, Step(2, operations=operations, **columns))
    assert type(caught.value) is kind
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
    for operation in (FREE, Operation.PREEMPT, ALLOCATE, Operation.COMMON_PREFIX):
        with world.refuses(NotFoundError):
            world.run(other, operation, request_numbers=[1], num_new_tokens=[1])
    assert session.requests


def test_unknown_pools_and_sessions_change_nothing(world: World) -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: world.allocator.pools.get("x"), "pool_name"),
        (lambda: world.allocator.sessions.find("x", 0.0), "session_id"),
        (lambda: world.allocator.close_session("x", 0.0), "session_id"),
    ]
    for call, field in calls:
        with world.refuses(KvpoolError, field=field):
            call()
