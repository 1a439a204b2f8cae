"""Slots in reserve, see `reserves`: what an engine sees, what is sent and when, and what is given back."""

import contextlib
from collections.abc import Sequence
from random import Random
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client import (
    Decodes,
    ExhaustedError,
    FullAttentionSpec,
    KVCacheGroup,
    Outcome,
    PoolConfig,
    Request,
    Session,
    WrongStateError,
)
from kvpool.client.blocking import run
from kvpool.client.reserves import REPORT_STEPS
from kvpool.client.transports.transport import SessionOptions
from kvpool.core.ids import PoolName
from kvpool.core.sessions.session import Session as CoreSession
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import MambaSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation, Step, StepResult
from support.session_transcript import RecordingTransport

RESERVE, ALLOCATE, FREE = Operation.RESERVE, Operation.ALLOCATE, Operation.FREE
FULL: Final = FullAttentionSpec(4)
MIXES: Final[dict[str, tuple[KVCacheSpec, ...]]] = {
    "full": (FULL,),
    "window": (FULL, SlidingWindowSpec(4, sliding_window=5)),
    "window alone": (SlidingWindowSpec(4, sliding_window=9),),
    "spans": (FullAttentionSpec(8), SlidingWindowSpec(4, sliding_window=6)),
    "states": (FULL, MambaSpec(4, only_step_ends=True)),
    "longer states": (FULL, MambaSpec(8, only_step_ends=True)),
    "states alone": (MambaSpec(4),),
}


class OpenTransport(RecordingTransport):
    """Gives a test access to the core's session."""

    refuse_in = 0
    """Number of messages up to one that is refused; 0 for none."""

    def behind(self, session: Session) -> CoreSession:
        return self._state.pools.get(PoolName("m")).sessions[session.session_number]

    def check(self) -> None:
        self._state.pools.get(PoolName("m")).check_integrity()

    async def apply(self, session_id: str, step: Step) -> StepResult:
        self.refuse_in -= 1
        if self.refuse_in == 0:
            raise ExhaustedError("MEMORY", "the process has too little memory")
        return await super().apply(session_id, step)


def pool(num_blocks: int = 100, mix: str = "full", max_tokens: int = 256, *, caching: bool = True) -> OpenTransport:
    transport = OpenTransport()
    groups = tuple(KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(MIXES[mix]))
    config = PoolConfig(
        PoolName("m"), num_blocks, max_tokens, groups, enable_caching=caching, allow_too_few_blocks=True
    )
    run(transport.create_pool(config))
    return transport


def opened(transport: OpenTransport, reserve_tokens: int = 8) -> Session:
    return Session(run(transport.open_session(SessionOptions("m", reserve_tokens=reserve_tokens))))


def running(session: Session, name: str = "r", num_tokens: int = 5) -> Request:
    request = session.request(name, range(num_tokens))
    assert session.admit(request)
    return request


def decode(session: Session, *requests: Request, **reports: int) -> Decodes:
    with session.step(**reports) as step:
        return step.decode(requests, [len(request.token_ids) for request in requests])


def decode_in_background(session: Session, *requests: Request) -> Decodes:
    """Decodes while an earlier step has no answer."""
    assert session._protocol.is_in_background
    builder = session.new_step()
    answer = builder.decode(requests, [len(request.token_ids) for request in requests])
    session.send(builder)
    return answer


class Player:
    """A scheduler with random requests. Its choices depend on refusals, not on the reserve."""

    def __init__(self, rng: Random, transport: OpenTransport, reserve_tokens: int, num_lookahead_tokens: int) -> None:
        self.rng, self.transport, self.num_lookahead_tokens = rng, transport, num_lookahead_tokens
        self.session, self.later = opened(transport, reserve_tokens), Random(rng.random())  # noqa: S311
        self.tables: dict[Request, list[list[int]]] = {}
        self.skipped: dict[Request, int] = {}
        self.log: list[object] = []

    def play(self, num_rounds: int) -> list[object]:
        for i in range(num_rounds):
            if len(self.tables) < 5 and self.rng.random() < 0.3:
                self.admit(f"r{i}")
            if self.tables:
                self.decode(list(self.tables))
            if self.tables and self.rng.random() < 0.05:
                self.free(self.rng.choice(list(self.tables)))
            if self.rng.random() < 0.3:
                self.session.mark_executed()
            self.check()
        return self.log

    def admit(self, name: str) -> None:
        request = self.session.request(name, [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 30))])
        admitted = self.session.admit(request)
        self.log.append(("admit", name, bool(admitted)))
        if admitted:
            pairs = zip(admitted.hit_blocks, admitted.new_blocks, strict=True)
            self.tables[request] = [[*hit, *new] for hit, new in pairs]
            self.skipped[request] = request.num_computed_tokens

    def decode(self, live: list[Request]) -> None:
        tokens: list[int] | None = [self.rng.randrange(3) for _ in live]
        num_in_flight = [self.rng.randrange(2) for _ in live]
        while live:
            for request, count in zip(live, num_in_flight, strict=False):
                self.skipped[request] = max(request.num_computed_tokens - count, self.skipped[request])
            answer = self.step(live, tokens, num_in_flight)
            for place, new in enumerate(answer.new_blocks):
                if place not in answer.refused:
                    for table, blocks in zip(self.tables[live[place]], new, strict=True):
                        table.extend(blocks)
            victim = list(self.tables)[-1]
            live = [live[place] for place in answer.refused if live[place] is not victim]
            num_in_flight = [0] * len(live)
            if answer.refused:
                self.log.append(("preempt", victim.request_id))
                self.session.preempt(victim)
                self.free(victim)
            tokens = None

    def step(self, live: list[Request], tokens: list[int] | None, num_in_flight: Sequence[int]) -> Decodes:
        wanted, in_background = 1 + self.num_lookahead_tokens, self.session._protocol.is_in_background
        columns: Any = {"num_lookahead_tokens": wanted - 1, "num_in_flight_tokens": num_in_flight}
        num_slots = min(each.held_tokens - each.num_computed_tokens for each in live)
        if in_background and self.later.random() < 0.7 and num_slots >= wanted:
            answer = (builder := self.session.new_step()).decode(live, tokens, **columns)
            assert not builder.rows
            self.session.send(builder)
            return answer
        with self.session.step() as step:
            return step.decode(live, tokens, **columns)

    def free(self, request: Request) -> None:
        with self.session.step() as step:
            step.free(request)
        del self.tables[request], self.skipped[request]

    def check(self) -> None:
        """Compares what an engine sees with the requests, and these with the server's."""
        self.transport.check()
        core, is_settled = self.transport.behind(self.session), self.session._protocol.unanswered() is None
        for request, tables in self.tables.items():
            for i, (group, table) in enumerate(zip(self.session.config.groups, tables, strict=True)):
                mine, span = request.block_ids[i], group.spec.block_size
                assert mine == [given if own else 0 for given, own in zip(table, mine, strict=True)]
                slots = request.num_computed_tokens + self.num_lookahead_tokens
                assert len(mine) in {-(-count // span) for count in range(request.num_computed_tokens, slots + 1)}
                assert mine.count(0) <= group.spec.num_skipped_tokens(self.skipped[request]) // span
                theirs = core.requests[request.request_id].tables[i].block_ids
                if is_settled:
                    assert theirs == mine + (request.reserve_ids[i] if request.reserve_ids else []), (
                        request,
                        i,
                        theirs,
                        mine,
                        request.reserve_ids,
                    )


@pytest.mark.parametrize("mix", MIXES)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([25, 40, 200]),
    reserve_tokens=st.sampled_from([1, 4, 16]),
    num_lookahead_tokens=st.sampled_from([0, 0, 3]),
)
def test_engines_see_the_blocks_of_computed_tokens(
    mix: str, seed: int, num_blocks: int, reserve_tokens: int, num_lookahead_tokens: int
) -> None:
    """Without caching, when hits do not depend on the order of free blocks, also the preemptions are the same.

    With several groups they nearly are: blocks behind windows are reported later than without a reserve.
    """
    Player(Random(seed), pool(num_blocks, mix), reserve_tokens, num_lookahead_tokens).play(60)  # noqa: S311
    logs = [
        Player(Random(seed), pool(num_blocks, mix, caching=False), each, num_lookahead_tokens).play(60)  # noqa: S311
        for each in (0, reserve_tokens)
    ]
    assert logs[0] == logs[1] or len(MIXES[mix]) > 1


@pytest.mark.parametrize("batches", [True, False])
def test_decodes_wait_for_no_message_while_the_reserve_lasts(*, batches: bool) -> None:
    """A report is sent at most 4 steps after a block is full, also if other calls are made between the decodes."""
    transport = pool()
    session = opened(transport)
    request = running(session)
    transport.take_sent()
    for i in range(60):
        with session.step() as step:
            if batches:
                step.decode([request], [i])
            else:
                request.append([i])
                step.allocate_slots(request, 1)
        assert not step.waits
        session.free(running(session, f"other{i}", 1))
        reported = transport.behind(session).requests[request.request_id].num_computed_tokens
        assert request.num_computed_tokens - reported <= 4 + REPORT_STEPS
    sent = [step for step in transport.take_sent() if RESERVE in step.operations]
    assert len(sent) == 60 // REPORT_STEPS
    assert sum(step.num_credit_allocations for step in sent) + session._protocol._num_on_credit <= 60


def test_a_step_that_is_outdated_reports_nothing() -> None:
    """So what is due is reported by the next step."""
    session = opened(pool())
    request, other = running(session, num_tokens=6), running(session, "other", 1)
    for _ in range(REPORT_STEPS - 2):
        decode(session, request)
    outdated, newer = session.new_step(), session.new_step()
    outdated.decode([request], [1])
    newer.decode([other], [1])
    session.send(newer)
    with pytest.raises(WrongStateError, match="another step"):
        session.send(outdated)
    assert not outdated.rows


def test_other_sessions_find_full_blocks_after_execution() -> None:
    """Within the steps between two reports, each for the blocks and for the execution; a free is reported at once."""
    transport = pool()
    session, other = opened(transport), opened(transport, 0)
    request = running(session, num_tokens=4)
    for _ in range(4 + 2 * REPORT_STEPS):
        decode(session, request, executed_sequence=session.sequence)
    assert other.get_computed_blocks(other.request("o", range(13))).num_tokens >= 8
    while request.num_computed_tokens % 4 != 1:
        decode(session, request)
    num_tokens = request.num_computed_tokens - 1
    executed = session.sequence
    session.free(request)
    found = other.get_computed_blocks(other.request("p", range(99))).num_tokens
    session.mark_executed()
    assert found < num_tokens
    assert other.get_computed_blocks(other.request("q", range(99))).num_tokens <= num_tokens
    assert executed < session.sequence


def test_a_reserve_is_given_back_in_the_message_that_asks_again() -> None:
    transport = pool(9, caching=False)
    session = opened(transport)
    first = running(session, "a", 8)  # takes 4 blocks of 8
    transport.take_sent()
    second = running(session, "b", 20)
    refused, again = transport.take_sent()
    assert (refused.operations, again.operations) == ([Operation.ADMIT], [RESERVE, Operation.ADMIT])
    assert (first.block_ids, first.reserve_ids, len(second.block_ids[0])) == ([[1, 2]], [[]], 5)
    assert decode(session, first).new_blocks[0] == [[8]]


def test_the_answers_of_a_step_stay_if_asking_again_is_refused() -> None:
    transport = pool(9, caching=False)
    session = opened(transport)
    first, second = running(session, "a", 8), running(session, "b", 16)
    transport.refuse_in = 2
    assert decode(session, second).refused == {0: Outcome.NO_BLOCKS}
    assert first.reserve_ids == [[3, 4]]
    transport.check()
    assert decode(session, second).refused == {}
    assert (first.reserve_ids, len(second.block_ids[0])) == ([[]], 5)


def test_what_is_asked_again_stays_within_the_budget() -> None:
    transport = pool(9, caching=False)
    session = opened(transport)
    running(session, "a", 8)
    requests = [session.request(name, range(count)) for name, count in (("b", 4), ("c", 20), ("d", 4))]
    with session.step(admission_budget_tokens=18) as step:
        answers = [step.admit(request) for request in requests]
    assert [answer.num_new_tokens for answer in answers] == [4, 14, 0]
    assert answers[2].outcome is Outcome.SKIPPED
    transport.check()


def test_a_reserve_that_another_session_wants_is_given_back() -> None:
    """With the next decodes, although other steps come before, and but for the slot that a decode needs."""
    transport = pool(12, caching=False)
    session, other = opened(transport), opened(transport, 0)
    request = running(session, num_tokens=8)
    assert len(request.reserve_ids[0]) == 2
    waiting = other.request("w", range(36))
    assert other.admit(waiting) is None
    session.free(running(session, "x", 1))
    session.free(running(session, "y", 1))
    assert decode(session, request).new_blocks[0] == [[3]]
    session.settle()
    assert (request.block_ids, request.reserve_ids) == ([[1, 2, 3]], [[]])
    transport.check()
    assert other.admit(other.request("v", range(32)))


def test_lookahead_slots_are_not_given_back() -> None:
    transport = pool(20, caching=False)
    session, other = opened(transport), opened(transport, 0)
    request = running(session, num_tokens=8)
    with session.step() as step:
        step.decode([request], num_lookahead_tokens=6)
    assert other.admit(other.request("w", range(72))) is None
    session.free(running(session, "x", 1))
    with session.step() as step:
        step.decode([request], num_lookahead_tokens=0)
    session.settle()
    assert (len(request.block_ids[0]), request.reserve_ids) == (4, [[]])
    assert transport.behind(session).requests[request.request_id].tables[0].block_ids == request.block_ids[0]


@pytest.mark.parametrize("caching", [True, False])
def test_a_step_in_the_background(*, caching: bool) -> None:
    """Decodes go on meanwhile; a step with operations, a report or another version of weights comes after it."""
    transport = pool(caching=caching)
    session = opened(transport, 16)
    request, done = running(session), running(session, "done")
    with session.step() as step:
        step.free(done)
    assert (session._protocol.is_in_background, session.sequence, done.num_computed_tokens) == (True, 2, 5)
    assert transport.behind(session).requests.keys() == {"r"}  # no wait for the step that settles it
    for _ in range(6):
        decode_in_background(session, request)
    assert request.num_computed_tokens == 11
    builder = session.new_step()
    builder.admit(session.request("new", range(5)))
    with pytest.raises(WrongStateError, match="settle"):
        session.send(builder)
    session.set_weights_version("2")
    assert (session.sequence, done.num_computed_tokens) == (3, 0)
    assert decode(session, request).refused == {}
    session.settle()
    session.close()
    transport.check()


def test_a_begun_step_asks_again_when_it_is_settled() -> None:
    transport = pool(9, caching=False)
    session = opened(transport)
    first, second = running(session, "a", 8), session.request("b", range(20))
    with session.begin_step() as step:
        answer = step.admit(second)
    with pytest.raises(WrongStateError, match="settle"):
        session.new_step()
    session.settle()
    assert (answer.ok, len(second.block_ids[0]), first.reserve_ids) == (True, 5, [[]])
    transport.check()


def test_a_close_needs_no_answer_to_a_step_in_the_background() -> None:
    transport = pool(caching=False)
    session = opened(transport)
    request = running(session)
    with session.step() as step:
        step.free(request)
    session.close()
    assert run(transport.get_pool("m")).free_blocks == 99


def test_a_lost_answer_to_a_step_in_the_background() -> None:
    transport = pool()
    session = opened(transport)
    request, done = running(session), running(session, "done")
    transport.lose = True
    with session.step() as step:
        step.free(done)
    decode_in_background(session, request)
    with pytest.raises(Exception, match="lost"):
        decode(session, request)
    assert decode(session, request).refused == {}
    assert (done.num_computed_tokens, request.num_computed_tokens) == (0, 7)
    transport.check()


def test_a_refused_step_in_the_background_restores_the_reserve() -> None:
    transport = pool(12, caching=False)
    session, other = opened(transport), opened(transport, 0)
    request = running(session, num_tokens=8)
    assert other.admit(other.request("w", range(36))) is None
    session.free(running(session, "x", 1))
    transport.refuse_in = 1
    assert decode(session, request).new_blocks[0] == [[3]]
    with pytest.raises(ExhaustedError):
        decode(session, request)
    assert (request.block_ids, request.reserve_ids, request.held_tokens) == ([[1, 2, 3]], [[4]], 16)
    for _ in range(9):
        assert decode(session, request).refused == {}
    session.settle()
    transport.check()
    table = transport.behind(session).requests[request.request_id].tables[0].block_ids
    assert table == request.block_ids[0] + request.reserve_ids[0]


def test_a_free_that_is_refused_in_the_background_is_made_again() -> None:
    transport = pool()
    session = opened(transport)
    request = running(session)
    transport.refuse_in = 1
    for _ in range(2):
        with session.step() as step:
            step.free(request)
        with contextlib.suppress(ExhaustedError):
            session.settle()
    assert request.freed
    assert not transport.behind(session).requests


@pytest.mark.parametrize("max_tokens", [12, 14])
def test_reserves_end_with_the_longest_request(max_tokens: int) -> None:
    transport = pool(max_tokens=max_tokens)
    session = opened(transport, 16)
    request = running(session)
    while request.num_computed_tokens < max_tokens:
        decode(session, request)
    session.free(request)
    transport.check()
