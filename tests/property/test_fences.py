"""Fences under random traffic: sessions open and end, steps run, and ranks lose connections.

The test connects the server's core and the protocol and fence of each rank by streams that only keep the order of
messages. Invariants: no session gets a block that a step of another session is writing, or that a rank would let such a
step write. When everything has settled, no block stays in quarantine.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.core.commands import EndReason, EndSession
from kvpool.core.errors import AbortedError, KvpoolError, UnavailableError
from kvpool.core.ids import PoolName, TableLease
from kvpool.core.ranks import messages
from kvpool.core.ranks.effects import (
    Effect,
    EpochPassed,
    LinkEnded,
    MessageSent,
    PoolOpened,
    PoolResumed,
    PoolSuspended,
    ProcessesGone,
    SessionsFenced,
)
from kvpool.core.ranks.membership import Membership
from kvpool.core.ranks.messages import Allocated, LinkId, PoolState
from kvpool.core.sessions.session import Session
from kvpool.gpu_worker import rank_effects
from kvpool.gpu_worker.rank_protocol import RankProtocol
from kvpool.lending.fence import Fence, StaleTablesError, StepTicket
from support.core import World
from support.integrity import check_integrity
from support.ranks import BLOCK_BYTES, TIMING, declared, declaring

WORLD_SIZE = 2
NUM_BLOCKS = 7
BLOCK_SIZE = 16
LEASE_SECONDS = 10.0
MEMORY = declared(blocks=NUM_BLOCKS, max_model_len=4 * BLOCK_SIZE, enable_caching=False)
BROKEN = UnavailableError("UNAVAILABLE", "gone")
MAX_SCHEDULERS = 3
ACTIONS = (
    *("open_session", "admit", "admit", "begin_step", "begin_step", "end_step", "evict", "evict", "close"),
    *("process_gone", "turn", "turn", "deliver", "deliver", "deliver"),
)
RANKS = st.integers(0, WORLD_SIZE - 1)
ANY = st.integers(0, 7)


@dataclass
class Scheduler:
    """A scheduler process, with its view of a session that may have ended."""

    session: Session
    lease: TableLease
    blocks: set[int] = field(default_factory=set)
    num_requests: int = 0


class RankProcess:
    """The process of a rank: its protocol, its fence, its running steps, and its end of the stream."""

    def __init__(self, rank: int, boot: int) -> None:
        self.rank = rank
        self.fence = Fence(self._steps_ended)
        registered = declaring(rank, WORLD_SIZE, MEMORY, boot_id=f"process-{boot:04}", fences=True)
        self.protocol = RankProtocol(registered, ("h:1",), self.fence)
        self.link: LinkId | None = None
        self.said: deque[rank_effects.WorkerMessage] = deque()
        self.heard: deque[messages.ServerMessage | KvpoolError] = deque()
        self.steps: list[tuple[StepTicket, Scheduler]] = []
        self.effects: list[rank_effects.Effect] = []

    def _steps_ended(self) -> None:
        self.effects += self.protocol.steps_ended()

    def may_write(self, scheduler: Scheduler) -> bool:
        """Whether a step of a scheduler runs on this rank, or would be accepted."""
        if any(each is scheduler for _, each in self.steps):
            return True
        with contextlib.suppress(StaleTablesError):
            self.fence.step(scheduler.lease).done()
            return True
        return False


class Fencing(RuleBasedStateMachine):
    """A server that sends fences at the end of a turn, as server/services/ranks.py does."""

    @initialize()
    def form(self) -> None:
        self.now_seconds = 1000.0
        self.num_boots = 0
        self.num_links = 0
        self.world = World()
        self.world.allocator.remove_pool("m")
        self.members = Membership(PoolName("m"), TIMING)
        self.by_link: dict[LinkId, RankProcess] = {}
        self.schedulers: list[Scheduler] = []
        self.must_fence = False
        self.ranks = [self._boot(rank) for rank in range(WORLD_SIZE)]
        self.settle()
        assert self.members.state is PoolState.READY
        assert self.world.pool.ranks_fence

    # Actions of schedulers.

    @rule(actions=st.lists(st.tuples(st.sampled_from(ACTIONS), ANY, RANKS), min_size=30, max_size=80))
    def traffic(self, actions: list[tuple[str, int, int]]) -> None:
        """Actions of schedulers, and delivery of messages between them."""
        for action, which, rank in actions:
            if self.schedulers or action == "open_session":
                getattr(self, action)(which, rank)

    def open_session(self, _which: int, _rank: int) -> None:
        if len(self.schedulers) == MAX_SCHEDULERS:
            return
        self.world.now_seconds = self.now_seconds
        with contextlib.suppress(UnavailableError):
            session = self.world.open(LEASE_SECONDS)
            lease = TableLease(self.world.pool.epoch, session.session_number)
            self.schedulers.append(Scheduler(session, lease))

    def admit(self, which: int, _rank: int) -> None:
        scheduler = self._scheduler(which)
        scheduler.num_requests += 1
        try:
            self.world.allocator.sessions.find(scheduler.session.session_id, self.now_seconds)
            result = self.world.admit(scheduler.session, scheduler.num_requests, "", 3 * BLOCK_SIZE)
        except KvpoolError:
            return
        new = set(result.block_ids)
        for process in self._in_epoch():
            for other in self.schedulers:
                if other is not scheduler and other.blocks & new:
                    assert not process.may_write(other), "allocated while a rank may run a step of the old owner"
        scheduler.blocks |= new

    def begin_step(self, which: int, rank: int) -> None:
        """Starts a step on a rank, of a session that is open or has ended."""
        process, scheduler = self.ranks[rank], self._scheduler(which)
        with contextlib.suppress(StaleTablesError):
            process.steps.append((process.fence.step(scheduler.lease), scheduler))

    def end_step(self, which: int, rank: int) -> None:
        process = self.ranks[rank]
        if process.steps:
            ticket, _ = process.steps.pop(which % len(process.steps))
            ticket.done()
            self._carry_out(process)

    def evict(self, which: int, _rank: int) -> None:
        with contextlib.suppress(KvpoolError):
            self.world.allocator.evict_session("m", self._scheduler(which).lease.session_number, self.now_seconds)
        self.must_fence = True

    def process_gone(self, which: int, rank: int) -> None:
        """A rank reports that a process of a session has exited; another one may still run steps."""
        number, link = self._scheduler(which).lease.session_number, self.ranks[rank].link
        if link is not None:
            with contextlib.suppress(AbortedError):
                self._do(self.members.sessions_gone(link, [number]))

    def close(self, which: int, _rank: int) -> None:
        """A scheduler closes its session when its steps are done, and exits, also if its session has already ended."""
        scheduler = self._scheduler(which)
        if not any(self._steps_of(scheduler)):
            with contextlib.suppress(KvpoolError):
                self.world.allocator.close_session(scheduler.session.session_id, self.now_seconds)
            self.schedulers.remove(scheduler)
            self.must_fence = True

    def deliver(self, which: int, rank: int) -> None:
        """Delivers some messages in both directions."""
        for _ in range(which + 1):
            self._to_rank(self.ranks[rank])
            self._to_server(self.ranks[rank])

    def turn(self, _which: int = 0, _rank: int = 0) -> None:
        """Ends a turn of the server's loop."""
        if self.must_fence and self.members.was_open:
            self.must_fence = False
            pool, allocator = self.world.pool, self.world.allocator
            live = [session.session_number for session in self.world.sessions()]
            self._do(self.members.fence(allocator.sessions.last_number, live, pool.quarantine.awaiting_ranks))

    @rule(rank=RANKS, dies=st.booleans())
    def lose_stream(self, rank: int, dies: bool) -> None:  # noqa: FBT001 - a strategy's
        """A rank loses its connection, or its process dies with its steps and is restarted."""
        self._break(self.ranks[rank], BROKEN)
        if dies:
            self.ranks[rank] = self._boot(rank)
            self.settle()

    @rule(seconds=st.sampled_from([1.0, 1.0, 4.0, 12.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now_seconds += seconds
        self.must_fence |= bool(self.world.allocator.expire(self.now_seconds, quarantine_seconds=1.0))
        self._do(self.members.tick(self.now_seconds))
        for process in self.ranks:
            self._carry_out(process, process.protocol.tick(self.now_seconds))

    @rule()
    def settle(self) -> None:
        """Delivers heartbeats and messages until no message is left."""
        for _ in range(60):
            self.now_seconds += 0.25
            for process in self.ranks:
                self._carry_out(process, process.protocol.tick(self.now_seconds))
                while process.said or process.heard:
                    self._to_server(process)
                    self._to_rank(process)
            self.turn()

    def teardown(self) -> None:
        """Checks that all blocks are free after all sessions have ended and all steps are done."""
        if not hasattr(self, "members"):
            return
        for _ in self.world.sessions():
            self.world.allocator.evict_session("m", self.world.sessions()[0].session_number, self.now_seconds)
        self.must_fence = True
        for process in self.ranks:
            while process.steps:
                self.end_step(0, process.rank)
        self.settle()
        assert self.members.state is PoolState.READY
        assert len(self.world.pool.quarantine) == 0
        assert self.world.pool.blocks.usage == 0.0

    @invariant()
    def pool_is_consistent(self) -> None:
        if hasattr(self, "members"):
            check_integrity(self.world.pool, self.world.sessions())

    def _scheduler(self, which: int) -> Scheduler:
        return self.schedulers[which % len(self.schedulers)]

    def _steps_of(self, scheduler: Scheduler) -> Iterator[StepTicket]:
        return (ticket for process in self.ranks for ticket, each in process.steps if each is scheduler)

    def _in_epoch(self) -> list[RankProcess]:
        """The processes that hold the pool's blocks."""
        ready = (process.protocol.ready for process in self.ranks)
        epoch = self.world.pool.epoch
        return [
            process for process, message in zip(self.ranks, ready, strict=True) if message and message.epoch == epoch
        ]

    def _boot(self, rank: int) -> RankProcess:
        self.num_boots += 1
        return RankProcess(rank, self.num_boots)

    def _to_server(self, process: RankProcess) -> None:
        if not process.said or process.link is None:
            process.said.clear()
            return
        link, members = process.link, self.members
        try:
            match process.said.popleft():
                case rank_effects.Initialized(epoch, got):
                    self._do(members.initialized(link, Allocated(epoch, got.num_blocks, got.allocated_bytes)))
                case rank_effects.Heartbeat(sequence, processes):
                    self._do(members.heartbeat(link, sequence, self.now_seconds, processes))
                case rank_effects.Fenced(sequence, pending):
                    self._do(members.fenced(link, sequence, pending))
                case rank_effects.Leave():
                    self._do(members.leave(link))
        except KvpoolError as error:
            process.heard.append(error)

    def _to_rank(self, process: RankProcess) -> None:
        if process.heard:
            message = process.heard.popleft()
            if isinstance(message, KvpoolError):
                self._break(process, message)
            else:
                self._carry_out(process, process.protocol.received(message, self.now_seconds))

    def _break(self, process: RankProcess, error: KvpoolError) -> None:
        """Ends the stream at both ends."""
        if self._hang_up(process):
            self._carry_out(process, process.protocol.stream_ended(error, self.now_seconds))

    def _hang_up(self, process: RankProcess) -> bool:
        """Ends the stream at the server; returns whether there was one."""
        link, process.link = process.link, None
        process.said.clear()
        process.heard.clear()
        if link is None:
            return False
        del self.by_link[link]
        self._do(self.members.link_broke(link, self.now_seconds))
        return True

    def _carry_out(self, process: RankProcess, effects: list[rank_effects.Effect] | None = None) -> None:
        """Does as a worker does; what it allocates is there at once."""
        process.effects += effects or []
        while process.effects:
            match process.effects.pop(0):
                case rank_effects.OpenStream(said):
                    self._register(process, said)
                case rank_effects.JoinLater():
                    self._hang_up(process)
                case rank_effects.Send(message):
                    process.said.append(message)
                case rank_effects.Allocate(planned):
                    got = rank_effects.Allocation(planned.config, planned.config.num_blocks, NUM_BLOCKS * BLOCK_BYTES)
                    process.effects += process.protocol.allocated(planned, got)
                case rank_effects.EpochBegan(ready):
                    process.fence.open(ready.epoch)
                case rank_effects.Failed(error):
                    raise AssertionError("a rank of ours is refused for good") from error
                case _:
                    pass

    def _register(self, process: RankProcess, registered: messages.Registration) -> None:
        self.num_links += 1
        link = process.link = LinkId(self.num_links)
        self.by_link[link] = process
        try:
            effects = self.members.register(link, registered, self.now_seconds)
        except KvpoolError as error:
            process.heard.append(error)
            return
        timing = TIMING
        process.heard.append(
            messages.Registered(timing.heartbeat_seconds, timing.heartbeat_timeout_seconds, timing.grace_seconds)
        )
        self._do(effects)

    def _do(self, effects: list[Effect]) -> None:
        """Carries out the effects of the membership as the server does."""
        for effect in effects:
            self._change_pool(effect)
            match effect:
                case MessageSent(link, message):
                    self._tell(link, message)
                    if isinstance(message, messages.Ready):
                        self.must_fence = True
                case LinkEnded():
                    self._tell(effect.link, effect.error)

    def _change_pool(self, effect: Effect) -> None:
        allocator = self.world.allocator
        match effect:
            case PoolOpened():
                self.world.pool = allocator.open_epoch(
                    effect.config, b"n" * 32, effect.epoch, ranks_fence=effect.ranks_fence
                )
            case PoolSuspended():
                allocator.suspend(self.world.pool)
            case PoolResumed():
                allocator.resume(self.world.pool)
            case EpochPassed():
                allocator.pass_epoch(self.world.pool, effect.epoch)
            case ProcessesGone():
                for session in self.world.sessions():
                    if session.session_number in effect.numbers:
                        end = EndSession(session.session_id, EndReason.PROCESS_GONE)
                        allocator.execute(end, self.now_seconds)
                        self.must_fence = True
            case SessionsFenced():
                allocator.end_quarantine("m", effect.numbers)

    def _tell(self, link: LinkId, message: messages.ServerMessage | KvpoolError) -> None:
        process = self.by_link.get(link)
        if process:
            process.heard.append(message)


TestFencing = Fencing.TestCase
TestFencing.settings = settings(max_examples=settings().max_examples * 5 // 2, stateful_step_count=10, derandomize=True)
