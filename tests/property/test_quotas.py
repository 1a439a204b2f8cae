"""Random sessions with quotas on one pool: minima are always available, maxima are never exceeded.

Whatever sessions share, hold and free, all of them could claim their minima at once at any moment.
"""

from copy import deepcopy
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import ExhaustedError
from kvpool.core.ids import NULL_BLOCK, RequestNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation, Outcome, StepResult
from support.core import BLOCK_SIZE, World, block_hashes
from support.integrity import check_integrity

FULL, WINDOW = FullAttentionSpec(BLOCK_SIZE), SlidingWindowSpec(BLOCK_SIZE, sliding_window=5)
CONTENTS = ("aaaaaaaa", "aaaaaabb", "cccccccc")
SESSIONS = st.integers(0, 3)
REQUESTS = st.integers(0, 5)


def last_outcome(result: StepResult) -> Outcome:
    return Outcome(result.outcomes[-1] if result.outcomes else 0)


class Quotas(RuleBasedStateMachine):
    """Up to four sessions, each with up to six requests."""

    @initialize(
        num_blocks=st.sampled_from([9, 14, 21]),
        specs=st.sampled_from([(FULL,), (WINDOW,), (FULL, WINDOW)]),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, num_blocks: int, specs: tuple[KVCacheSpec, ...], *, caching: bool) -> None:
        self.world = World(num_blocks, specs=specs, enable_caching=caching)
        self.numbers = count(1)
        self.contents: dict[int, str] = {}
        self.world.open(quota=Quota(num_blocks // 2))
        self.world.open()

    @precondition(lambda self: len(self.world.sessions()) < 4)
    @rule(min_blocks=st.sampled_from([0, 0, 1, 3, 8]), beyond=st.sampled_from([None, 0, 2, 5]))
    def open(self, min_blocks: int, beyond: int | None) -> None:
        quota = Quota(min_blocks, 0 if beyond is None else min_blocks + beyond)
        before, left = self.world.snapshot(), self.world.pool.quotas.num_left
        if min_blocks <= left:
            self.world.open(quota=quota)
            return
        with pytest.raises(ExhaustedError):
            self.world.open(quota=quota)
        assert self.world.snapshot() == before

    @precondition(lambda self: self.world.sessions())
    @rule(which=SESSIONS, content=st.sampled_from(CONTENTS), num_tokens=st.integers(1, 29), ahead=st.integers(0, 5))
    def admit(self, which: int, content: str, num_tokens: int, ahead: int) -> None:
        session = self.session(which)
        if len(session.requests) < 6:
            number = next(self.numbers)
            self.contents[number] = content
            result = self.ask(self.world, session, number, content, num_tokens, ahead)
            assert last_outcome(result) in (Outcome.OK, Outcome.NO_BLOCKS, Outcome.OVER_QUOTA, Outcome.NEVER_FITS)

    @precondition(lambda self: self.world.sessions())
    @rule(which=SESSIONS, request=REQUESTS, ahead=st.integers(0, 5))
    def admit_again(self, which: int, request: int, ahead: int) -> None:
        session = self.session(which)
        waiting = [r for r in session.requests.values() if not r.holds_blocks and not r.num_computed_tokens]
        if waiting:
            number = waiting[request % len(waiting)].number
            self.run_allocating(session, Operation.ADMIT, number, num_lookahead_tokens=[ahead])

    @precondition(lambda self: self.world.sessions())
    @rule(which=SESSIONS, request=REQUESTS, num_tokens=st.integers(1, 9))
    def grow(self, which: int, request: int, num_tokens: int) -> None:
        session = self.session(which)
        running = [r for r in session.requests.values() if r.holds_blocks]
        if not running:
            return
        known = running[request % len(running)]
        content, before = self.contents[known.number], known.num_tokens
        caching = self.world.pool.config.enable_caching
        full_before, full = before // BLOCK_SIZE, (before + num_tokens) // BLOCK_SIZE
        self.run_allocating(
            session,
            Operation.ALLOCATE,
            known.number,
            num_appended_tokens=[num_tokens],
            num_new_tokens=[num_tokens],
            block_hashes=block_hashes(content, full)[full_before * 32 :] if caching else b"",
        )

    @precondition(lambda self: self.world.sessions())
    @rule(which=SESSIONS, request=REQUESTS, operation=st.sampled_from([Operation.FREE, Operation.PREEMPT]))
    def give_back(self, which: int, request: int, operation: Operation) -> None:
        session = self.session(which)
        requests = list(session.requests.values())
        if requests:
            self.world.run(session, operation, request_numbers=[requests[request % len(requests)].number])

    @precondition(lambda self: self.world.sessions())
    @rule(which=SESSIONS, seconds=st.sampled_from([0.0, 10.0]))
    def end(self, which: int, seconds: float) -> None:
        """Ends a session at once, or with a quarantine."""
        now_seconds, number = self.world.now_seconds, self.session(which).session_number
        self.world.allocator.evict_session("m", number, now_seconds, quarantine_seconds=seconds)

    @rule()
    def release(self) -> None:
        self.world.allocator.end_due_quarantines(self.world.now_seconds + 10.0)

    @rule()
    def lose_all(self) -> None:
        self.world.allocator.pass_epoch(self.world.pool, self.world.pool.epoch + 1)
        self.world.pool.is_suspended = False

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            check_integrity(self.world.pool, self.world.sessions())

    @invariant()
    def minima_are_available(self) -> None:
        """Each session can get its minimum now, and all of them at once if each preempts its own requests."""
        if not hasattr(self, "world"):
            return
        for session in self.world.sessions():
            if session.holding and session.holding.num_lacking:
                world = deepcopy(self.world)
                self.claim(world, world.sessions()[self.world.sessions().index(session)])
        world = deepcopy(self.world)
        for session in world.sessions():
            if session.holding and session.holding.min_blocks:
                for request in list(session.requests.values()):
                    world.run(session, Operation.PREEMPT, request_numbers=[request.number])
                self.claim(world, session)
        check_integrity(world.pool, world.sessions())

    def claim(self, world: World, session: Session) -> None:
        """Takes the lacking blocks of the minimum, with a prompt that no other session uses."""
        assert session.holding
        num_groups = len(world.pool.config.groups)
        num_blocks = session.holding.num_lacking // num_groups
        if num_blocks:
            number = 1_000_000 + session.session_number
            result = self.ask(world, session, number, chr(0x100 + session.session_number), num_blocks * BLOCK_SIZE, 0)
            assert last_outcome(result) is Outcome.OK
            assert session.holding.num_lacking < num_groups

    @staticmethod
    def ask(  # noqa: PLR0913, PLR0917 - what a request is
        world: World, session: Session, number: int, content: str, num_tokens: int, ahead: int
    ) -> StepResult:
        lacking = session.holding.num_lacking if session.holding else 0
        caching = world.pool.config.enable_caching
        result = world.run(
            session,
            Operation.ADMIT,
            request_numbers=[number],
            num_appended_tokens=[num_tokens],
            num_lookahead_tokens=[ahead],
            block_hashes=block_hashes(content, num_tokens // BLOCK_SIZE) if caching else b"",
            request_ids=[f"r{number}"],
        )
        needed = -(-(num_tokens + ahead) // BLOCK_SIZE) * len(world.pool.config.groups)
        if needed <= lacking:
            assert last_outcome(result) is Outcome.OK, "refused within its minimum"
        world.run(session, executed=session.sequence)  # other sessions can hit it
        return result

    def run_allocating(self, session: Session, operation: Operation, number: int, **columns: Any) -> None:
        request = session.by_number[RequestNumber(number)]
        held = self.held(request)
        result = self.world.run(session, operation, request_numbers=[number], **columns)
        if last_outcome(result) is not Outcome.OK:
            assert set(self.held(request)) <= set(held), "a refusal takes nothing"
        self.world.run(session, executed=session.sequence)

    @staticmethod
    def held(request: Request) -> list[int]:
        # A refused allocation may have put the null block where a window has passed, as in vLLM.
        return [block_id for table in request.tables for block_id in table.block_ids if block_id != NULL_BLOCK]

    def session(self, which: int) -> Session:
        sessions = self.world.sessions()
        return sessions[which % len(sessions)]


Quotas.TestCase.settings = settings(
    report_multiple_bugs=False,
    max_examples=settings().max_examples * 6 // 10,
    stateful_step_count=20,
    derandomize=True,
)
TestQuotas = Quotas.TestCase
