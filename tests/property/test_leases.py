"""Rule 3 of session.py: a lease has expired for all observers or for none, and an ended session stays ended."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.core.errors import AbortedError
from kvpool.core.pause_tolerant_clock import MAX_RUN_SECONDS, PauseTolerantClock
from support.core import World
from support.integrity import check_integrity

LEASE_SECONDS = 4.0
TURNS = [0.0, 0.25, 0.5, 1.0, 1.75, 2.0, 3.75, 4.0, 4.25]
"""Binary fractions, so that sums equal the end of the lease exactly."""


class Leases(RuleBasedStateMachine):
    """One session in explicit time: calls, streams and expiry."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.session = self.world.open(LEASE_SECONDS)
        self.world.admit(self.session, 1, "abc", 13)
        self.now_seconds = 0.0
        self.last_seen_seconds = 0.0
        self.streams = 0
        self.told_over = False

    @property
    def is_over(self) -> bool:
        return self.told_over or (not self.streams and self.now_seconds >= self.last_seen_seconds + LEASE_SECONDS)

    def renew(self) -> None:
        self.last_seen_seconds = self.now_seconds

    @rule(turn=st.sampled_from(TURNS))
    def pass_time(self, turn: float) -> None:
        self.now_seconds += turn

    @rule()
    def call(self) -> None:
        sessions, session_id = self.world.allocator.sessions, self.session.session_id
        if self.is_over:
            with pytest.raises(AbortedError) as caught:
                self.ask()
            assert caught.value.reason == "LEASE_EXPIRED"
            was_ended = self.session not in self.world.sessions()
            assert sessions.is_overdue(session_id, self.now_seconds) != was_ended
            self.told_over = True
        else:
            self.ask()
            self.renew()

    def ask(self) -> None:
        self.world.allocator.touch_session(self.session.session_id, self.now_seconds)

    @rule()
    def expire(self) -> None:
        was_over, was_open = self.is_over, bool(self.world.sessions())
        ended = self.world.allocator.expire(self.now_seconds)
        assert bool(ended) == (was_over and was_open)
        self.told_over = was_over

    @precondition(lambda self: not self.is_over)
    @rule()
    def attach(self) -> None:
        self.world.allocator.attach_stream(self.session)
        self.streams += 1

    @precondition(lambda self: self.streams)
    @rule()
    def detach(self) -> None:
        self.world.allocator.detach_stream(self.session, self.now_seconds)
        self.streams -= 1
        self.renew()

    @invariant()
    def it_holds_blocks_while_it_is_open(self) -> None:
        assert (self.world.pool.blocks.usage > 0) == bool(self.world.sessions())
        check_integrity(self.world.pool, self.world.sessions())


TestLeases = Leases.TestCase


class Absences(RuleBasedStateMachine):
    """A server that lets its clock run and is stopped at times."""

    def __init__(self) -> None:
        super().__init__()
        self.source_seconds = 0.0
        self.clock = PauseTolerantClock(lambda: self.source_seconds)
        self.left_seconds = 0.0
        self.read_seconds = 0.0

    @rule()
    def start_clock(self) -> None:
        self.clock.start()
        self.left_seconds = MAX_RUN_SECONDS
        assert self.clock.now_seconds() == pytest.approx(self.read_seconds, abs=1e-6)

    @rule(seconds=st.one_of(st.floats(0, MAX_RUN_SECONDS), st.floats(0, 1e5)))
    def pass_time(self, seconds: float) -> None:
        self.source_seconds += seconds
        counted_seconds = min(seconds, self.left_seconds)
        self.left_seconds -= counted_seconds
        read_seconds = self.clock.now_seconds()
        assert read_seconds - self.read_seconds == pytest.approx(counted_seconds, abs=1e-6)
        self.read_seconds = read_seconds


TestAbsences = Absences.TestCase
