"""Budgets: what the sessions of a token, and all sessions, hold together."""

import pytest

from kvpool.core.commands import OpenSession
from kvpool.core.errors import ExhaustedError
from kvpool.core.ids import SessionId
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Step
from kvpool.server.limits.budgets import Budgets
from kvpool.server.limits.config import Limits
from support.core import World


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
