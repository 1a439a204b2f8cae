"""Ranks that join, leave, fall silent and are replaced in any order; the rules of membership must always hold."""

import contextlib
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.core.errors import AbortedError, KvpoolError, UnavailableError, WrongStateError
from kvpool.core.ranks.effects import EpochPassed, PoolOpened, PoolResumed
from kvpool.core.ranks.messages import (
    Allocated,
    HeldTensors,
    LinkId,
    Planned,
    PoolState,
    RankState,
    Ready,
    Registration,
)
from support.ranks import BLOCK_BYTES, Gathering, declared, declaring, registration

WORLD_SIZE = 3
BLOCKS_OF_ONE_REQUEST = 65
RANKS = st.integers(0, WORLD_SIZE - 1)


@dataclass(slots=True, eq=False)
class Process:
    """The process of a rank, with its own view; its tensors are lost when it ends."""

    rank: int
    boot_id: str
    held: HeldTensors | None = None
    got: int = 0
    planned_epoch: int = 0
    link: LinkId | None = None


class Ranks(RuleBasedStateMachine):
    """Rule numbers are those of core/ranks/membership.py."""

    def __init__(self) -> None:
        super().__init__()
        self.world = Gathering()
        self.count = 0
        self.processes = [self._new(rank) for rank in range(WORLD_SIZE)]
        self.seen: dict[LinkId, int] = {}
        self.seen_pool = 0
        self.in_epoch: list[str] = []

    def _new(self, rank: int) -> Process:
        self.count += 1
        return Process(rank, f"process-{rank}-{self.count}")

    @initialize()
    def form(self) -> None:
        for rank in range(WORLD_SIZE):
            self.join(rank)
        for rank in range(WORLD_SIZE):
            self.allocate(rank, 100)
        assert self.world.is_serving

    @rule(rank=RANKS)
    def join(self, rank: int) -> None:
        process = self.processes[rank]
        process.link = self._register(process) or process.link

    @rule(rank=RANKS, epochs=st.sampled_from([-1, 1]))
    def join_with_contents_of_another_epoch(self, rank: int, epochs: int) -> None:
        process = self.processes[rank]
        if process.held and process.held.epoch + epochs > 0:
            process.held = HeldTensors(process.held.epoch + epochs, process.held.num_blocks)
            epoch = self.world.members.epoch
            self.join(rank)
            assert not self.world.is_serving
            assert self.world.members.epoch >= epoch

    @rule(rank=RANKS)
    def a_second_process_claims_a_rank(self, rank: int) -> None:
        alive = self.world.members.registry.rank_infos()[rank].state not in (RankState.LOST, RankState.ABSENT)
        rival = self._new(rank)
        rival.link = self._register(rival)
        assert (rival.link is None) == alive, "rule 2"
        if rival.link:
            self.processes[rank] = rival

    @rule(rank=RANKS, num_blocks=st.integers(BLOCKS_OF_ONE_REQUEST - 1, 100))
    def allocate(self, rank: int, num_blocks: int) -> None:
        process = self.processes[rank]
        plan = self._newest_plan(process)
        if plan is None or process.link is None:
            return
        if process.planned_epoch != plan.epoch:
            process.got, process.planned_epoch = num_blocks, plan.epoch
        got = Allocated(plan.epoch, process.got, process.got * BLOCK_BYTES)
        with contextlib.suppress(AbortedError):
            self.world.do(self.world.members.initialized(process.link, got))

    @rule()
    def all_allocate(self) -> None:
        for rank in range(WORLD_SIZE):
            self.allocate(rank, 100)

    @rule(rank=RANKS)
    def beat(self, rank: int) -> None:
        process = self.processes[rank]
        if process.link is not None:
            with contextlib.suppress(AbortedError):
                self.world.beat(process.link)

    @rule(rank=RANKS)
    def lose_stream(self, rank: int) -> None:
        process = self.processes[rank]
        if process.link is not None:
            self.world.break_link(process.link)
            process.link = None

    @rule(rank=RANKS, says_so=st.booleans())
    def restart(self, rank: int, says_so: bool) -> None:  # noqa: FBT001 - a strategy's
        link = self.processes[rank].link
        if link is not None and says_so:
            with contextlib.suppress(AbortedError):
                self.world.do(self.world.members.leave(link))
        self.lose_stream(rank)
        self.processes[rank] = self._new(rank)
        self.join(rank)

    @rule(silent=st.sets(RANKS, max_size=2), seconds=st.sampled_from([6, 40]))
    def wait(self, silent: set[int], seconds: int) -> None:
        for _ in range(seconds // 2):
            self.world.now_seconds += 2.0
            for rank in set(range(WORLD_SIZE)) - silent:
                self.beat(rank)
            self.world.wait(0.0)

    @rule()
    def recover(self) -> None:
        """Checks that the pool serves once all ranks send heartbeats, join and allocate."""
        self.wait(set(), 40)
        for rank in range(WORLD_SIZE):
            self.processes_read_their_messages()
            if self.processes[rank].link is None:
                self.join(rank)
        for _ in range(2):  # a rank with too few blocks for one request is refused, and then joins with more
            self.all_allocate()
            self.processes_read_their_messages()
            for rank in range(WORLD_SIZE):
                if self.processes[rank].link is None:
                    self.processes[rank] = self._new(rank)
                    self.join(rank)
        self.all_allocate()
        assert self.world.is_serving

    def teardown(self) -> None:
        self.recover()

    @invariant()
    def processes_read_their_messages(self) -> None:
        for process in self.processes:
            if process.link is None:
                continue
            sent = self.world.sent[process.link]
            for effect in sent[self.seen.get(process.link, 0) :]:
                if isinstance(effect, Ready):
                    assert effect.num_blocks <= process.got, "more blocks than the rank has"
                    process.held = HeldTensors(effect.epoch, process.got)
                elif isinstance(effect, KvpoolError):
                    process.link = None
                    break
            else:
                self.seen[process.link] = len(sent)

    @invariant()
    def nothing_is_sent_after_the_end(self) -> None:
        for sent in self.world.sent.values():
            errors = [i for i, effect in enumerate(sent) if isinstance(effect, KvpoolError)]
            assert errors in ([], [len(sent) - 1])

    @invariant()
    def the_pool_serves_only_when_all_ranks_are_present(self) -> None:
        states = {info.state for info in self.world.members.registry.rank_infos()}
        assert self.world.is_serving == (self.world.members.state is PoolState.READY)
        if self.world.is_serving:
            assert states == {RankState.READY}, "rule 1"
        assert self.world.members.epoch >= self.world.epoch

    @invariant()
    def absent_ranks_match_the_rank_states(self) -> None:
        away = (RankState.ABSENT, RankState.SILENT, RankState.LOST)
        infos = self.world.members.registry.rank_infos()
        assert self.world.members.registry.absent == tuple(info.rank for info in infos if info.state in away)

    @invariant()
    def contents_belong_to_the_processes_that_opened_the_epoch(self) -> None:
        for effect in self.world.pool[self.seen_pool :]:
            if isinstance(effect, PoolOpened):
                self.in_epoch = [process.boot_id for process in self.processes]
            elif isinstance(effect, EpochPassed):
                self.in_epoch = []
            elif isinstance(effect, PoolResumed):
                assert self.in_epoch == [process.boot_id for process in self.processes], "rules 3 and 4"
        self.seen_pool = len(self.world.pool)

    def _register(self, process: Process) -> LinkId | None:
        before = self.world.snapshot()
        try:
            return self.world.register(self._registration(process))
        except (WrongStateError, UnavailableError):
            assert self.world.snapshot() == before, "rule 5"
            return None

    def _registration(self, process: Process) -> Registration:
        return registration(process.rank, WORLD_SIZE, boot_id=process.boot_id, held=process.held)

    def _newest_plan(self, process: Process) -> Planned | None:
        sent = self.world.sent[process.link] if process.link is not None else []
        return next((effect for effect in reversed(sent) if isinstance(effect, Planned)), None)


class DeclaringRanks(Ranks):
    """Ranks that declare their memory. A restarted one declares another number of blocks, or another size per block."""

    def _registration(self, process: Process) -> Registration:
        number = int(process.boot_id.rpartition("-")[2])
        memory = declared(blocks=100 + number, block_bytes=BLOCK_BYTES * (1 + number % 2))
        return declaring(process.rank, WORLD_SIZE, memory, boot_id=process.boot_id, held=process.held)


TestRanks = Ranks.TestCase
TestRanks.settings = settings(max_examples=settings().max_examples * 3 // 2, stateful_step_count=30)

TestDeclaringRanks = DeclaringRanks.TestCase
TestDeclaringRanks.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=30)
