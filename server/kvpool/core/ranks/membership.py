"""The ranks of one pool: who is there, what was planned, whether the pool may serve.

1. The pool serves only while every rank of the world is there with its tensors.
2. A rank is one process at a time: another is refused while the first is alive, and while it is silent.
3. The epoch goes up when a rank that held contents is given up, and with every new plan: nothing handed out in one
   epoch is valid in another, also over a restart of the server, since ranks say which epoch they were in.
4. A rank that comes back within the grace time with the boot id and the tensors it had changes nothing.
5. Every change returns its effects, in order; a refusal changes nothing.
6. A session that ended is let go when every rank, also one that is away, has answered that no step of it is in flight.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from kvpool.core.errors import (
    AbortedError,
    InvalidArgumentError,
    KvpoolError,
    UnavailableError,
    WrongStateError,
    check_range,
)
from kvpool.core.ids import MAX_BLOCKS, PoolName, SessionNumber
from kvpool.core.planning.plan import Plan, PlanError, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.ranks.fences import Fences
from kvpool.core.ranks.messages import (
    Allocated,
    Effect,
    EpochPassed,
    LinkEnded,
    LinkId,
    MessageSent,
    Planned,
    PoolOpened,
    PoolResumed,
    PoolState,
    PoolStatus,
    PoolSuspended,
    Rank,
    RankGroup,
    RankGroupOptions,
    RankInfo,
    RankState,
    RankTiming,
    Ready,
    Registration,
)
from kvpool.core.ranks.registry import Member, RankRegistry

TOLD_ABSENT_RANKS: Final = 64


class Membership:
    """The ranks of a pool.

    Attributes:
        name: The pool's.
        epoch: The epoch that is, or will be when the pool opens.
        state: Whether the pool serves.
        owner: Name of the token that the first rank showed; empty for none.
    """

    def __init__(
        self, name: PoolName, timing: RankTiming, max_blocks: int = MAX_BLOCKS, past_epoch: int = 0, *, owner: str = ""
    ) -> None:
        """Starts with nobody.

        Args:
            name: The pool's.
            timing: How long ranks are waited for.
            max_blocks: Most blocks that the server gives a pool.
            past_epoch: Newest epoch that a pool of this name is known to have had.
            owner: Name of the token that its first rank shows; empty for none.
        """
        self.name = name
        self.epoch = past_epoch + 1
        self.state = PoolState.FORMING
        self.owner = owner
        self._timing = timing
        self._max_blocks = max_blocks
        self._registry = RankRegistry()
        self._fences = Fences(self._registry)
        self._plan: Plan | None = None
        """Of this epoch; None until it is made."""
        self._has_contents = False
        """Whether the pool opened in this epoch."""

    def __repr__(self) -> str:
        here = self.world_size - self._registry.num_absent
        return f"<Membership {self.name!r}: {here} of {self.world_size} ranks, {self.state.value}, epoch {self.epoch}>"

    @property
    def world_size(self) -> int:
        """Ranks that the pool takes."""
        return self._registry.world_size

    @property
    def options(self) -> RankGroupOptions:
        """What they all said."""
        return self._registry.options

    @property
    def is_empty(self) -> bool:
        """Whether no rank is there or may come back."""
        return not self._registry

    @property
    def was_open(self) -> bool:
        """Whether the pool has ever opened."""
        return self.state is not PoolState.FORMING

    @property
    def absent_ranks(self) -> tuple[Rank, ...]:
        """Ranks that are not there, in order."""
        return self._registry.first_absent(self.world_size)

    def is_absent(self, rank: Rank) -> bool:
        """Whether a rank is not there."""
        return self._registry.is_absent(rank)

    @property
    def next_deadline_seconds(self) -> float:
        """When `tick` is due next, as things stand; infinity if nobody is there."""
        return min((self._due_seconds(member) for member in self._registry), default=float("inf"))

    def rank_infos(self) -> tuple[RankInfo, ...]:
        """How each rank is."""
        return self._registry.rank_infos()

    def register(self, link: LinkId, registration: Registration, now_seconds: float) -> list[Effect]:
        """Takes a rank in: a new one, one that comes back, or the successor of one that was lost.

        When no plan can be made of what all ranks bring, none is left waiting for it: before the pool first opens all
        streams end with the planner's error, later that of the rank that it names, else of the one that came last.

        Raises:
            InvalidArgumentError: Something is out of range.
            WrongStateError: It differs from the other ranks, or the rank is taken.
            UnavailableError: The rank is silent, and may come back.
        """
        registration.check()
        before = self._registry.of_rank(registration.rank)
        member = Member(registration, link, now_seconds)
        comes_back = before is not None and before.registration.boot_id == registration.boot_id
        if not comes_back and all(other.state is RankState.LOST for other in self._registry):
            return self._start_over(member)
        self._registry.check_alike(registration)
        if before is None:
            return self._take_in(member)
        if not comes_back:
            self._check_successor(before, now_seconds)
            return self._give_up(before) + self._take_in(member)
        return self._come_back(before, member)

    def initialized(self, link: LinkId, allocated: Allocated) -> list[Effect]:
        """Notes what a rank got; opens the pool when all have told.

        Raises:
            InvalidArgumentError: There was no such plan, or the number of blocks is out of range.
            AbortedError: The rank was given up.
        """
        member = self._member_of(link)
        check_range("initialized.num_blocks", allocated.num_blocks, 2, MAX_BLOCKS)
        if allocated.epoch > self.epoch:
            raise InvalidArgumentError("initialized.epoch", f"{allocated.epoch} was not planned yet")
        if allocated.epoch < self.epoch or self._plan is None or member.state is not RankState.ALLOCATING:
            return []  # what it answers is no longer asked
        member.allocated = allocated
        member.state = RankState.READY
        if all(other.state is RankState.READY for other in self._registry):
            return self._open(self._plan)
        return []

    def heard(self, link: LinkId, sequence: int, now_seconds: float) -> list[Effect]:
        """Notes a sign of life; a silent rank is back.

        Raises:
            AbortedError: The rank was given up.
        """
        member = self._member_of(link)
        member.last_seen_seconds = now_seconds
        effects: list[Effect] = []
        if member.state is RankState.SILENT:
            self._registry.is_back(member, RankState.READY if self._has_contents else RankState.REGISTERED)
            effects = self._resume_if_complete() if self._has_contents else self._plan_if_complete(member)
        return [*effects, self._status(member, sequence)]

    def fence(
        self, last_session_number: SessionNumber, live: Sequence[SessionNumber], awaiting: Iterable[SessionNumber]
    ) -> list[Effect]:
        """Tells ranks whose steps may run: to be called when they were told "ready", and when sessions have ended.

        A rank that is away is told when it is back, as the pool is then ready again.

        Args:
            last_session_number: The number that was given last.
            live: Sessions of the pool that live, ascending.
            awaiting: Numbers that have ended, and are to be told of when all ranks have answered.
        """
        return self._fences.begin(self.epoch, last_session_number, live, awaiting) if self._has_contents else []

    def fenced(self, link: LinkId, sequence: int) -> list[Effect]:
        """Notes that a rank keeps a fence, and all before it.

        Raises:
            InvalidArgumentError: It was never sent.
            AbortedError: The rank was given up.
        """
        return self._fences.answered(self._member_of(link), sequence)

    def leave(self, link: LinkId) -> list[Effect]:
        """Gives up a rank that goes for good.

        Raises:
            AbortedError: It was given up before.
        """
        return self._give_up(self._member_of(link))

    def link_broke(self, link: LinkId, now_seconds: float) -> list[Effect]:
        """Notes that a stream ended: the rank is waited for if it held contents, else forgotten."""
        member = self._registry.of_link(link)
        if member is None or member.state is RankState.LOST:
            return []
        if not self._has_contents:
            return self._give_up(member)
        if member.state is RankState.SILENT:
            member.state = RankState.LOST
            return []
        return self._go_away([member], RankState.LOST, now_seconds)

    def tick(self, now_seconds: float) -> list[Effect]:
        """Finds the ranks that fell silent, and gives up those that were waited for long enough."""
        due = [member for member in self._registry if self._due_seconds(member) <= now_seconds]
        waited_for = [member for member in due if not self._has_contents or member.is_away]
        fell_silent = [member for member in due if self._has_contents and not member.is_away]
        effects = self._go_away(fell_silent, RankState.SILENT, now_seconds) if fell_silent else []
        for member in waited_for:
            if self._registry.of_link(member.link) is not member:
                continue  # forgotten with one before it
            if member.state is not RankState.LOST:
                message = f"nothing was heard of rank {member.registration.rank}"
                effects.append(LinkEnded(member.link, AbortedError("RANK_GIVEN_UP", message)))
            effects += self._give_up(member)
        return effects

    def rank_group(self) -> RankGroup:
        """What another process of the server must know to take the ranks back."""
        if not self._has_contents:
            return RankGroup(self.epoch, self._registry.options)
        members = sorted(self._registry, key=lambda member: member.registration.rank)
        told = tuple((member.registration, member.allocated) for member in members if member.allocated)
        return RankGroup(self.epoch, self._registry.options, self._plan, told)

    def restore(self, rank_group: RankGroup, links: Iterable[LinkId], now_seconds: float) -> None:
        """Begins where the server's process before this one ended: the ranks are lost, and may come back.

        Args:
            rank_group: What it knew of them.
            links: A new number for each, under which no stream will ever be.
            now_seconds: The time, from which on they are waited for.
        """
        self.epoch, self.state = rank_group.epoch, PoolState.DEGRADED
        if rank_group.plan is None:
            return
        self._plan, self._has_contents = rank_group.plan, True
        self._registry.start_over(len(rank_group.members), rank_group.options)
        for (registration, allocated), link in zip(rank_group.members, links, strict=False):
            member = Member(registration, link, now_seconds, allocated=allocated)
            self._registry.add(member)
            self._registry.goes_away(member, RankState.LOST, now_seconds)

    def forgive(self, seconds: float) -> None:
        """Prolongs all waits, as nobody was listened to for so long: the server's own process was busy or stopped."""
        for member in self._registry:
            member.last_seen_seconds += seconds
            member.away_seconds += seconds

    def _due_seconds(self, member: Member) -> float:
        if member.is_away:
            return member.away_seconds + self._timing.grace_seconds
        return member.last_seen_seconds + self._timing.heartbeat_timeout_seconds

    def _member_of(self, link: LinkId) -> Member:
        member = self._registry.of_link(link)
        if member is None:
            raise AbortedError("RANK_GIVEN_UP", "this stream's rank was given up; join again")
        return member

    def _check_successor(self, before: Member, now_seconds: float) -> None:
        who = f"rank {before.registration.rank} of pool {self.name!r}"
        missed = now_seconds - before.last_seen_seconds > 2 * self._timing.heartbeat_seconds
        if before.state is RankState.SILENT or (missed and before.state is not RankState.LOST):
            left = max(self._due_seconds(before) - now_seconds, 0.0)
            message = f"{who} is silent, and is waited for {left:.1f} s more"
            raise UnavailableError("RANK_SILENT", message, retry_seconds=min(left, 1.0))
        if before.state is not RankState.LOST:
            raise WrongStateError(
                "RANK_TAKEN",
                f"{who} is process {before.registration.pid} on {before.registration.host or 'its host'}, and alive",
                field="register.rank",
            )

    def _come_back(self, before: Member, member: Member) -> list[Effect]:
        effects: list[Effect] = []
        if before.state is not RankState.LOST:
            error = AbortedError("STREAM_SUPERSEDED", "another stream of this rank took over")
            effects.append(LinkEnded(before.link, error))
        registration, earlier = member.registration, before.registration
        got, held = before.allocated, registration.held
        has_all = self._has_contents and got and held and (held.epoch, held.num_blocks) == (self.epoch, got.num_blocks)
        is_as_before = (registration.layers, registration.fences) == (earlier.layers, earlier.fences)
        if not has_all or not is_as_before:
            return effects + self._give_up(before) + self._take_in(member)
        member.allocated, member.state = got, RankState.READY
        member.fence_sent, member.fence_answered = before.fence_sent, before.fence_answered
        self._registry.remove(before)
        self._registry.add(member)
        if self._plan and self.state is PoolState.READY:  # a second stream, and nobody was missed meanwhile
            return [*effects, self._ready(member, self._plan)]
        return effects + (self._resume_if_complete() or [self._status(member)])

    def _start_over(self, first: Member) -> list[Effect]:
        """Takes in a rank with which none must agree, as all others are lost; what it says the next must say too."""
        lost = next(iter(self._registry), None)
        effects = self._give_up(lost) if lost else []
        self._registry.start_over(first.registration.world_size, first.registration.options)
        return effects + self._take_in(first)

    def _take_in(self, member: Member) -> list[Effect]:
        self._registry.add(member)
        return self._plan_if_complete(member) or [self._status(member)]

    def _plan_if_complete(self, newest: Member) -> list[Effect]:
        if not self._registry.is_complete:
            return []
        try:
            plan = self._make_plan()
        except KvpoolError as error:
            return self._fail(error, self._at_fault(error, newest))
        told = (member.registration.last_epoch for member in self._registry)
        next_epoch = self.epoch + 1 if self._plan else self.epoch
        self.epoch = max(next_epoch, max(told) + 1)
        self._plan = plan
        effects: list[Effect] = []
        members = sorted(self._registry, key=lambda member: member.registration.rank)
        for member, config in zip(members, plan.configs, strict=True):
            member.state = RankState.ALLOCATING
            effects.append(MessageSent(member.link, Planned(self.epoch, config, plan.max_model_len)))
        return effects

    def _make_plan(self, num_blocks: int = 0) -> Plan:
        said = self._registry.registrations()
        ranks = [RankMemory(registration.layers, registration.available_bytes) for registration in said]
        plan = get_kv_cache_configs(ranks, self.options.with_num_blocks(num_blocks))
        if plan.num_blocks > self._max_blocks:
            message = f"{plan.num_blocks} have room, this server gives a pool at most {self._max_blocks}: ask for fewer"
            raise InvalidArgumentError("options.num_blocks_override", message, reason="TOO_MANY_BLOCKS")
        self.options.pool_config(self.name, plan).check()
        return plan

    def _open(self, plan: Plan) -> list[Effect]:
        """Opens the pool with as many blocks as every rank got."""
        got = [(member, member.allocated.num_blocks) for member in self._registry if member.allocated]
        fewest = min(num_blocks for _, num_blocks in got)
        if fewest < plan.num_blocks:
            try:
                plan = self._make_plan(fewest)
            except KvpoolError as error:
                at_fault = [member for member, blocks in got if blocks == fewest or not self.was_open]
                return self._fail(error, at_fault)
        self._plan = plan
        self._has_contents = True
        self.state = PoolState.READY
        opened = PoolOpened(self.options.pool_config(self.name, plan), self.epoch, self._fences.are_answered)
        return [opened, *(self._ready(member, plan) for member in self._registry)]

    def _at_fault(self, error: KvpoolError, newest: Member) -> list[Member]:
        """Whose streams end when no plan can be made; of a pool that was open, the others keep what they hold."""
        if not self.was_open:
            return list(self._registry)
        rank = error.rank if isinstance(error, PlanError) else None
        named = None if rank is None else self._registry.of_rank(rank)
        return [named or newest]

    def _fail(self, error: KvpoolError, at_fault: Iterable[Member]) -> list[Effect]:
        """Ends the streams of ranks that cannot be planned with."""
        effects: list[Effect] = []
        for member in at_fault:
            effects += [LinkEnded(member.link, error), *self._give_up(member)]
        return effects

    def _go_away(self, members: Iterable[Member], state: RankState, now_seconds: float) -> list[Effect]:
        """Notes that ranks are silent or lost. The others are told of the first; of more, in answer to heartbeats."""
        for member in members:
            self._registry.goes_away(member, state, now_seconds)
        if self.state is not PoolState.READY:
            return []
        self.state = PoolState.DEGRADED
        return [PoolSuspended(), *self._statuses()]

    def _resume_if_complete(self) -> list[Effect]:
        if self._plan is None or not self._registry.is_complete:
            return []
        plan = self._plan
        self.state = PoolState.READY
        return [PoolResumed(), *(self._ready(member, plan) for member in self._registry)]

    def _give_up(self, member: Member) -> list[Effect]:
        """Forgets a rank; what all ranks held in this epoch is worth nothing without it.

        Others that are lost need not be waited for any more; one that is silent may still answer the next plan.
        """
        self._registry.remove(member)
        for other in self._registry:
            if other.state is RankState.LOST:
                self._registry.remove(other)
            elif other.state is not RankState.SILENT:
                other.state = RankState.REGISTERED
            other.allocated = None
        if not self._has_contents:
            return []
        self.epoch += 1
        self._plan = None
        self._has_contents = False
        self._fences.clear()
        self.state = PoolState.DEGRADED
        return [EpochPassed(self.epoch), *self._statuses()]

    def _ready(self, member: Member, plan: Plan) -> Effect:
        return MessageSent(member.link, Ready(self.epoch, plan.num_blocks, plan.max_model_len))

    def _status(self, member: Member, sequence: int = 0) -> Effect:
        absent = self._registry.first_absent(TOLD_ABSENT_RANKS)
        return MessageSent(member.link, PoolStatus(self.state, self.epoch, absent, sequence))

    def _statuses(self) -> list[Effect]:
        return [self._status(member) for member in self._registry if member.state is not RankState.LOST]
