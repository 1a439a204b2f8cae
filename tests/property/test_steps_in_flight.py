"""Sessions with quotas, each with several steps in flight.

No step in flight uses a block that another session may write. Minima are always available, maxima are never exceeded:
whatever sessions share, hold and free, all of them could claim their minima at once at any moment.
"""

from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import ExhaustedError
from kvpool.core.ids import NULL_BLOCK, BlockId
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.core.state import State
from kvpool.core.steps.columns import Operation, Outcome, StepResult
from support.core import BLOCK_SIZE, World, block_hashes
from support.integrity import check_integrity
from support.journal import assert_alike

FULL, WINDOW = FullAttentionSpec(BLOCK_SIZE), SlidingWindowSpec(BLOCK_SIZE, sliding_window=10)
MAX_TOKENS = 24
CONTENTS = ("abcdef", "abcxyz")
MAX_IN_FLIGHT = 3


@dataclass
class Engine:
    """A session, and the steps that it has launched and not reported as executed.

    Attributes:
        in_flight: Number of each step, and the blocks that it reads or writes.
        last_launched: The newest step with work.
        executed: The newest step that has run.
    """

    session: Session
    in_flight: deque[tuple[int, set[BlockId]]] = field(default_factory=deque)
    last_launched: int = 0
    executed: int = 0
    num_requests: int = 0

    @property
    def used(self) -> set[BlockId]:
        return {block_id for _, blocks in self.in_flight for block_id in blocks}


def held_by(request: Request) -> set[BlockId]:
    # A refused allocation may have put the null block where a window has passed, as in vLLM.
    return {block_id for table in request.tables for block_id in table.block_ids if block_id != NULL_BLOCK}


def num_within_minimum(world: World, session: Session) -> int:
    """Number of blocks that a session can have now because of its minimum."""
    num_waiting = len(world.pool.blocks.free_list.held_by(session.session_number))
    return max(session.holding.num_lacking - num_waiting, 0) if session.holding else 0


def claim(world: World, session: Session) -> None:
    """Takes the lacking blocks of the minimum, with prompts that no other session uses.

    The first ones may come from blocks that wait for steps of the session itself; then more are lacking.
    """
    number = 100 * session.session_number
    while num_blocks := num_within_minimum(world, session) // len(world.pool.config.groups):
        number += 1
        result = world.admit(session, number, chr(0x100 + number), num_blocks * BLOCK_SIZE)
        assert not result.outcomes, "refused within its minimum"


class StepsInFlight(RuleBasedStateMachine):
    """Engines that schedule ahead, share prefixes, preempt, abort, close and vanish."""

    @initialize(
        num_blocks=st.sampled_from((14, 9, 21)),
        specs=st.sampled_from(((FULL, WINDOW), (FULL,), (WINDOW,))),
        caching=st.sampled_from((True, True, False)),
    )
    def start(self, num_blocks: int, specs: tuple[KVCacheSpec, ...], *, caching: bool) -> None:
        self.world = World(num_blocks, specs=specs, enable_caching=caching)
        self.engines: list[Engine] = []
        self.vanished: list[Engine] = []

    def _step(self, engine: Engine, *operations: Operation, **columns: Any) -> StepResult:
        """Makes a step; what it schedules is in flight until `run` is called."""
        block_hash = self.world.pool.blocks.block_hash
        hashes = [block_hash(BlockId(i)) for i in range(self.world.pool.blocks.num_blocks)]
        before = {b for r in engine.session.requests.values() for t in r.tables for b in t.held_block_ids}
        result = self.world.run(
            engine.session,
            *operations,
            executed=engine.executed,
            launched_sequence=engine.last_launched,
            **columns,
        )
        names = [engine.session.by_number.get(number) for number in columns.get("request_numbers", ())]
        tables = [t for r in names if r and r.holds_blocks for t in r.tables]
        after = {b for r in engine.session.requests.values() for t in r.tables for b in t.held_block_ids}
        foreign = {b for each in (*self.engines, *self.vanished) if each is not engine for b in each.used}
        hits = {b for b in after - before if hashes[b] and hashes[b] == block_hash(b)}
        assert not (after - before - hits) & foreign, "a block that a step of another session uses is given out"
        if Operation.ADMIT in operations or Operation.ALLOCATE in operations:
            engine.last_launched = result.sequence
            engine.in_flight.append((result.sequence, {b for t in tables for b in t.held_block_ids}))
        return result

    def _some(self, data: Any) -> Engine:
        engine: Engine = data.draw(st.sampled_from(self.engines))
        return engine

    @precondition(lambda self: len(self.engines) < 3)
    @rule(min_blocks=st.sampled_from((0, 0, 2, 6)), beyond=st.sampled_from((None, None, 0, 4)))
    def open(self, min_blocks: int, beyond: int | None) -> None:
        quota = Quota(min_blocks, 0 if beyond is None else min_blocks + beyond)
        if min_blocks <= self.world.pool.quotas.num_left:
            self.engines.append(Engine(self.world.open(quota=quota)))
            return
        before = self.world.snapshot()
        with pytest.raises(ExhaustedError):
            self.world.open(quota=quota)
        assert self.world.snapshot() == before

    @precondition(lambda self: any(len(each.in_flight) < MAX_IN_FLIGHT for each in self.engines))
    @rule(
        data=st.data(),
        content=st.sampled_from(CONTENTS),
        num_tokens=st.integers(1, MAX_TOKENS),
        ahead=st.sampled_from((0, 0, 5)),
    )
    def admit(self, data: Any, content: str, num_tokens: int, ahead: int) -> None:
        engine = self._some(data)
        if len(engine.in_flight) == MAX_IN_FLIGHT:
            return
        engine.num_requests += 1
        number, num_lacking = engine.num_requests, num_within_minimum(self.world, engine.session)
        result = self._step(
            engine,
            Operation.ADMIT,
            request_numbers=[number],
            num_appended_tokens=[num_tokens],
            num_lookahead_tokens=[ahead],
            block_hashes=self._hashes(content, 0, num_tokens),
            request_ids=[f"r{number}"],
        )
        if result.outcomes:
            assert result.outcomes[0] in (Outcome.NO_BLOCKS, Outcome.OVER_QUOTA, Outcome.NEVER_FITS)
            num_groups = len(self.world.pool.config.groups)
            assert num_groups * -(-(num_tokens + ahead) // BLOCK_SIZE) > num_lacking, "refused within its minimum"
            self._step(engine, Operation.FREE, request_numbers=[number])

    def _hashes(self, content: str, before: int, after: int) -> bytes:
        if not self.world.pool.config.enable_caching:
            return b""
        return block_hashes(content, after // BLOCK_SIZE)[before // BLOCK_SIZE * 32 :]

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), count=st.integers(1, 9))
    def decode(self, data: Any, count: int) -> None:
        engine = self._some(data)
        numbers = [n for n, r in engine.session.by_number.items() if r.holds_blocks and r.num_tokens < MAX_TOKENS]
        if not numbers or len(engine.in_flight) == MAX_IN_FLIGHT:
            return
        request = engine.session.by_number[data.draw(st.sampled_from(numbers))]
        name, held = f"{engine.session.session_number}.{request.number}", held_by(request)
        result = self._step(
            engine,
            Operation.ALLOCATE,
            request_numbers=[request.number],
            num_appended_tokens=[count],
            num_new_tokens=[count + request.num_tokens - request.num_computed_tokens],
            block_hashes=self._hashes(name * 9, request.num_tokens, request.num_tokens + count),
        )
        assert not result.outcomes or held_by(request) <= held, "a refusal takes nothing"

    @precondition(lambda self: any(each.session.requests for each in self.engines))
    @rule(data=st.data(), operation=st.sampled_from((Operation.FREE, Operation.PREEMPT)))
    def leave(self, data: Any, operation: Operation) -> None:
        engine = data.draw(st.sampled_from([each for each in self.engines if each.session.requests]))
        number = data.draw(st.sampled_from(list(engine.session.by_number)))
        self._step(engine, operation, request_numbers=[number])
        if operation is Operation.PREEMPT:
            self._step(engine, Operation.FREE, request_numbers=[number])

    @precondition(lambda self: any(each.in_flight for each in self.engines))
    @rule(data=st.data(), reports=st.booleans())
    def run(self, data: Any, *, reports: bool) -> None:
        engine = data.draw(st.sampled_from([each for each in self.engines if each.in_flight]))
        engine.executed = engine.in_flight.popleft()[0]
        if reports:
            self.world.allocator.mark_executed(self.world.pool, engine.session, engine.executed)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        engine = self._some(data)
        engine.in_flight.clear()
        self.engines.remove(engine)
        self.world.allocator.close_session(engine.session.session_id, self.world.now_seconds)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def vanish(self, data: Any) -> None:
        engine = self._some(data)
        self.engines.remove(engine)
        self.vanished.append(engine)
        number = engine.session.session_number
        self.world.allocator.evict_session("m", number, self.world.now_seconds, quarantine_seconds=1.0)

    @precondition(lambda self: self.vanished)
    @rule()
    def end_quarantine(self) -> None:
        engine = self.vanished.pop(0)
        engine.in_flight.clear()
        self.world.allocator.end_quarantine("m", [engine.session.session_number])

    @rule()
    def lose_all(self) -> None:
        self.world.allocator.pass_epoch(self.world.pool, self.world.pool.epoch + 1)
        self.world.allocator.resume(self.world.pool)
        self.engines.clear()
        self.vanished.clear()

    @rule()
    def reset(self) -> None:
        self.world.allocator.reset_prefix_cache(self.world.pool)

    @rule()
    def restore(self) -> None:
        with self.world.allocator.snapshot() as snapshot:
            made = State()
            made.restore(snapshot)
        pool, quotas = made.pools.get("m"), self.world.pool.quotas
        check_integrity(pool, pool.sessions.values())
        assert (pool.quotas.num_left, pool.quotas.num_covering) == (quotas.num_left, quotas.num_covering)
        if not any(each.session.holding for each in self.engines):  # otherwise restored in another order
            assert_alike(self.world.allocator, made)

    @invariant()
    def is_sound(self) -> None:
        check_integrity(self.world.pool, self.world.sessions())

    @invariant()
    def minima_are_available(self) -> None:
        """Each session can get its minimum now, and all of them at once if each preempts its own requests."""
        for i, session in enumerate(self.world.sessions()):
            if num_within_minimum(self.world, session):
                world = deepcopy(self.world)
                claim(world, world.sessions()[i])
        world = deepcopy(self.world)
        for session in world.sessions():
            if session.holding and session.holding.min_blocks:
                for number in list(session.by_number):
                    world.run(session, Operation.PREEMPT, request_numbers=[number])
                claim(world, session)
        check_integrity(world.pool, world.sessions())

    @invariant()
    def nothing_waits_without_a_step(self) -> None:
        pool = self.world.pool
        if all(not each.in_flight and each.session.executed_sequence >= each.last_launched for each in self.engines):
            assert not pool.blocks.free_list.num_held
            assert not pool.in_flight.kept


TestStepsInFlight = StepsInFlight.TestCase
TestStepsInFlight.settings = settings(stateful_step_count=40, deadline=None)
