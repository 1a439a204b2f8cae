"""Budgets: the limits of a step, and what a session, the sessions of a token, and all sessions hold together."""

import pytest

from kvpool.core.commands import OpenSession
from kvpool.core.errors import ExhaustedError
from kvpool.core.ids import SessionId
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Step
from kvpool.server.limits.budgets import MAX_COMMON_PREFIXES, MAX_EVICTED_BLOCKS, MAX_HIT_BLOCKS, Budgets
from kvpool.server.limits.config import Limits
from support.core import World, opened


class _Sessions:
    """Sessions of tokens in one pool, whose steps are checked before they are applied."""

    def __init__(self, **limits: int) -> None:
        self.world = World(100)
        self.budgets = Budgets(Limits(**limits), self.world.allocator.sessions)
        self._numbers = iter(range(1, 100))

    def open(self, owner: str) -> Session:
        opened = OpenSession("m", SessionId(f"s{next(self._numbers)}"), "", 10.0, owner=owner)
        return self.world.allocator.sessions[self.world.allocator.execute(opened, 0.0).session_id][1]

    def declare(self, session: Session, *, num_tokens: int = 1, frees: int = 0) -> int:
        """Declares a request, checked, in a step that may free another; returns its number."""
        number = next(self._numbers)
        step = Step(session.sequence + 1, operations=[Operation.APPEND], request_numbers=[number], declares=[True])
        step.request_ids, step.num_appended_tokens = [f"r{number}"], [num_tokens]
        step.block_hashes = b"h" * 32 * (num_tokens // 4)
        if frees:
            step.operations.append(Operation.FREE)
            step.request_numbers.append(frees)
            step.declares.append(False)
            step.num_appended_tokens.append(0)
        self.budgets.check_step(self.world.pool, session, step)
        self.world.apply(session, step)
        return number


@pytest.mark.parametrize(
    ("limit", "owners", "reason"),
    [
        ("max_token_requests", ("a", "a"), "TOO_MANY_TOKEN_REQUESTS"),
        ("max_total_requests", ("a", ""), "TOO_MANY_REQUESTS"),
        ("max_token_tokens", ("a", "a"), "TOO_MANY_TOKEN_TOKENS"),
        ("max_total_tokens", ("a", ""), "TOO_MANY_TOKENS"),
    ],
)
def test_what_sessions_hold_together(limit: str, owners: tuple[str, str], reason: str) -> None:
    sessions = _Sessions(**{limit: 3})
    one, other = map(sessions.open, owners)
    first = sessions.declare(one)
    sessions.declare(one)
    sessions.declare(other)
    before = sessions.world.snapshot()
    for session in (one, other):
        with pytest.raises(ExhaustedError, match="more than 3 ") as caught:
            sessions.declare(session)
        assert (caught.value.reason, caught.value.retry_seconds) == (reason, 1.0)
        assert limit.replace("_", "-") in caught.value.message
    assert sessions.world.snapshot() == before
    third = sessions.declare(one, frees=first)
    sessions.world.run(one, Operation.FREE, request_numbers=[third])
    sessions.declare(other)
    with pytest.raises(ExhaustedError):
        sessions.declare(other)


def test_another_token_is_not_affected() -> None:
    sessions = _Sessions(max_token_requests=1)
    sessions.declare(sessions.open("a"))
    sessions.declare(sessions.open("b"))
    without = sessions.open("")
    for _ in range(3):
        sessions.declare(without)


def test_what_an_ended_session_held_counts_no_more() -> None:
    sessions = _Sessions(max_token_tokens=8)
    one = sessions.open("a")
    sessions.declare(one, num_tokens=8)
    sessions.world.allocator.close_session(one.session_id, 0.0)
    sessions.declare(sessions.open("a"), num_tokens=8)


def test_a_retry_counts_nothing() -> None:
    sessions = _Sessions(max_token_requests=1)
    one = sessions.open("a")
    sessions.declare(one)
    again = Step(1, operations=[Operation.APPEND], request_numbers=[9], declares=[True], request_ids=["r9"])
    sessions.budgets.check_step(sessions.world.pool, one, again)


def refused(world: World, session: Session, step: Step, words: str, **limits: int) -> tuple[str, str | None]:
    """The reason and the field of the error that a step gets; it changes nothing."""
    before = world.snapshot()
    with pytest.raises(ExhaustedError, match=words) as caught:
        check(world, session, step, **limits)
    assert world.snapshot() == before
    return caught.value.reason, caught.value.field


def check(world: World, session: Session, step: Step, **limits: int) -> None:
    Budgets(Limits(**limits), world.allocator.sessions).check_step(world.pool, session, step)


def test_requests_of_a_session_without_those_that_the_step_frees() -> None:
    world, session = opened()
    world.admit(session, 1, "a", 4)
    step = Step(2, operations=[Operation.APPEND], request_numbers=[2], declares=[True], request_ids=["b"])
    check(world, session, step, max_session_requests=2)
    step.operations, step.request_numbers, step.declares = [Operation.APPEND] * 2, [2, 3], [True] * 2
    step.request_ids = ["b", "c"]
    assert refused(world, session, step, "requests", max_session_requests=2) == ("TOO_MANY_REQUESTS", "request_ids")
    step.operations.append(Operation.FREE)
    step.request_numbers.append(1)
    step.declares.append(False)
    check(world, session, step, max_session_requests=2)


def test_tokens_of_a_session() -> None:
    world, session = opened()
    world.admit(session, 1, "abc", 12)
    grow = Step(2, operations=[Operation.APPEND], request_numbers=[1], num_appended_tokens=[8])
    check(world, session, grow, max_session_tokens=20)
    grow.num_appended_tokens = [9]
    found = refused(world, session, grow, "more than 20 tokens", max_session_tokens=20)
    assert found == ("TOO_MANY_TOKENS", "num_appended_tokens")
    grow.num_appended_tokens = [world.pool.config.max_model_len + 1]  # malformed, which the core refuses
    check(world, session, grow, max_session_tokens=20)
    world.free(session, 1)
    assert session.num_tokens == 0


def test_common_prefixes_of_a_step() -> None:
    world, session = opened()
    step = Step(1, operations=[Operation.COMMON_PREFIX] * MAX_COMMON_PREFIXES)
    check(world, session, step)
    step.operations.append(Operation.COMMON_PREFIX)
    assert refused(world, session, step, "more than 64 operations")[0] == "STEP_TOO_LARGE"


@pytest.mark.parametrize(
    ("operation", "most"), [(Operation.EVICT, MAX_EVICTED_BLOCKS), (Operation.ALLOCATE, MAX_HIT_BLOCKS)]
)
def test_block_ids_of_a_step(operation: Operation, most: int) -> None:
    world, session = opened()
    step = Step(1, operations=[operation], num_block_ids=[most], block_ids=[1] * most)
    check(world, session, step)
    step.block_ids.append(1)
    words = f"{most + 1} block ids; the maximum for this step is {most}"
    assert refused(world, session, step, words) == ("STEP_TOO_LARGE", "block_ids")


def test_a_retried_step_is_answered_regardless_of_the_current_limits() -> None:
    world, session = opened()
    world.admit(session, 1, "abc", 12)
    step = Step(1, operations=[Operation.APPEND] * 5)
    check(world, session, step, max_step_operations=4)
    step.sequence = 2
    found = refused(world, session, step, "5 operations; the maximum is 4", max_step_operations=4)
    assert found == ("STEP_TOO_LARGE", "operations")


def test_tokens_of_freed_requests_do_not_count() -> None:
    world, session = opened()
    world.admit(session, 1, "abc", 12)
    step = Step(2, operations=[Operation.FREE, Operation.APPEND], request_numbers=[1, 2], declares=[False, True])
    step.num_appended_tokens, step.request_ids = [0, 12], ["b"]
    check(world, session, step, max_session_tokens=12)
    step.operations[0] = Operation.PREEMPT
    assert refused(world, session, step, "tokens", max_session_tokens=12)[0] == "TOO_MANY_TOKENS"
