"""Membership of a pool: the state of its ranks, the current plan, and whether the pool may serve.

1. The pool serves only while every rank is present with its tensors.
2. A rank belongs to one process at a time. Another process is refused while the first is alive or silent.
3. The epoch increases when a rank that held contents is given up, and with every new plan. Nothing handed out in one
   epoch is valid in another. This also holds across a restart of the server, since ranks report their last epoch.
4. A rank that returns within the grace time with the same boot id and the same tensors changes nothing.
5. Every change returns its effects, in order. A refusal changes nothing.
6. An ended session is released when every rank, including silent and lost ones, has answered that none of its steps is
   in flight.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from kvpool.core.errors import (
    AbortedError,
    InvalidArgumentError,
    KvpoolError,
    UnavailableError,
    WrongStateError,
    check_range,
    check_size,
)
from kvpool.core.ids import MAX_BLOCKS, MAX_CLIENT_NAME_BYTES, PoolName, SessionNumber
from kvpool.core.planning.plan import Plan, PlanError
from kvpool.core.ranks import pool_plan
from kvpool.core.ranks.effects import (
    Effect,
    EpochPassed,
    LinkEnded,
    MessageSent,
    PoolOpened,
    PoolResumed,
    PoolSuspended,
    ProcessesGone,
)
from kvpool.core.ranks.fences import Fences
from kvpool.core.ranks.messages import (
    MAX_EPOCH_LEAD,
    MAX_MAPPING_PROCESSES,
    MAX_NAMED_SESSIONS,
    Allocated,
    HeldTensors,
    LinkId,
    MappingProcess,
    Planned,
    PoolState,
    PoolStatus,
    RankGroup,
    RankState,
    RankTiming,
    Ready,
    Registration,
)
from kvpool.core.ranks.registry import Member, RankRegistry
from kvpool.core.specs.pool_config import PoolConfig

MAX_REPORTED_ABSENT_RANKS: Final = 64
_KEPT_BY_A_RETURN: Final = ("world_size", "options", "layers", "declared", "fences", "num_host_blocks")
"""What a rank that returns must register with again, so that nothing changes."""


class Membership:
    """The ranks of a pool.

    Attributes:
        name: Name of the pool.
        epoch: The current epoch, or the epoch that starts when the pool opens.
        state: State of the pool.
        owner: Name of the token of the first rank; empty for none.
        registry: The registered ranks. Read-only; change it through this class.
    """

    def __init__(  # noqa: PLR0913 - what a server knows of the pool
        self,
        name: PoolName,
        timing: RankTiming,
        max_blocks: int = MAX_BLOCKS,
        past_epoch: int = 0,
        *,
        owner: str = "",
        check: Callable[[PoolConfig, str], None] = lambda config, _: config.check(),
    ) -> None:
        """Creates a membership without ranks.

        Args:
            name: Name of the pool.
            timing: Heartbeat interval and timeouts.
            max_blocks: Maximum number of blocks of a pool on this server.
            past_epoch: Newest known epoch of any pool of this name; 0 for none.
            owner: Name of the token of the first rank; empty for none.
            check: Raises KvpoolError if a planned pool is not valid on this server. Gets the configuration, and the
                name of the field that limits the number of blocks.
        """
        self.name = name
        self.epoch = past_epoch + 1
        self.state = PoolState.FORMING
        self.owner = owner
        self._timing = timing
        self._max_blocks = max_blocks
        self._check = check
        self.registry = RankRegistry()
        self._fences = Fences(self.registry)
        self._plan: Plan | None = None
        """The plan of this epoch; None before it is made."""
        self._has_contents = False
        """Whether the pool opened in this epoch."""

    def __repr__(self) -> str:
        ranks = f"{self.registry.num_present} of {self.registry.world_size} ranks"
        return f"<Membership {self.name!r}: {ranks}, {self.state.value}, epoch {self.epoch}>"

    @property
    def was_open(self) -> bool:
        """Whether the pool has ever opened."""
        return self.state is not PoolState.FORMING

    @property
    def num_planned_blocks(self) -> int:
        """Number of blocks of the newest plan, those in host memory included; 0 before there is one."""
        ranks = self.registry.registrations()
        return self._plan.num_blocks + pool_plan.num_host_blocks(ranks) if self._plan and ranks else 0

    @property
    def next_deadline_seconds(self) -> float:
        """When `tick` is due next, in seconds; infinity without ranks."""
        return min((self._due_seconds(member) for member in self.registry), default=float("inf"))

    def register(self, link: LinkId, registration: Registration, now_seconds: float) -> list[Effect]:
        """Registers a rank: a new one, a returning one, or the successor of a lost one.

        If planning fails, streams end with the planner's error, so that no rank waits for a plan that cannot be made.
        Before the pool first opens, all streams end. Later only one ends: that of the rank at fault, or of the newest
        rank if the error names none.

        Raises:
            InvalidArgumentError: A value is out of range.
            WrongStateError: The registration differs from the other ranks, or another process has the rank.
            UnavailableError: The rank is silent and may return.
        """
        registration.check()
        if registration.declared and registration.declared.config.name != self.name:
            raise InvalidArgumentError("declared.config.name", f"is not {self.name!r}, the name of the pool")
        if not 0 <= registration.last_epoch <= self.epoch + MAX_EPOCH_LEAD:
            message = f"{registration.last_epoch}; the server knows {self.epoch}: start it with a higher --past-epoch"
            raise InvalidArgumentError("last_epoch", message)
        before = self.registry.of_rank(registration.rank)
        member = Member(registration, link, now_seconds)
        returns = before is not None and before.registration.boot_id == registration.boot_id
        if not returns and all(other.state is RankState.LOST for other in self.registry):
            lost = next(iter(self.registry), None)
            return (self._give_up(lost) if lost else []) + self._add_member(member)
        self.registry.check_agreement(registration)
        if before is None:
            return self._add_member(member)
        if not returns:
            self._check_successor(before, now_seconds)
            return self._give_up(before) + self._add_member(member)
        return self._reconnect(before, member)

    def initialized(self, link: LinkId, allocated: Allocated) -> list[Effect]:
        """Records the allocation of a rank; opens the pool when all ranks have allocated.

        Raises:
            InvalidArgumentError: The plan does not exist, or the number of blocks is out of range.
            AbortedError: The rank was given up.
        """
        member = self._member_of(link)
        check_range("initialized.num_blocks", allocated.num_blocks, 2, MAX_BLOCKS)
        if allocated.epoch > self.epoch:
            raise InvalidArgumentError("initialized.epoch", f"epoch {allocated.epoch} is not planned yet")
        if allocated.epoch < self.epoch or self._plan is None or member.state is not RankState.ALLOCATING:
            return []  # the answer to an earlier plan
        member.allocated = allocated
        member.state = RankState.READY
        if all(other.state is RankState.READY for other in self.registry):
            return self._open(self._plan)
        return []

    def heartbeat(
        self, link: LinkId, sequence: int, now_seconds: float, mapping_processes: Sequence[MappingProcess] = ()
    ) -> list[Effect]:
        """Records a heartbeat, and the processes that may map the rank's memory; a silent rank becomes present again.

        Raises:
            InvalidArgumentError: There are too many processes, or a name is too long.
            AbortedError: The rank was given up.
        """
        member = self._member_of(link)
        check_range("heartbeat.mapping_processes", len(mapping_processes), 0, MAX_MAPPING_PROCESSES)
        for i, process in enumerate(mapping_processes):
            check_size(f"heartbeat.mapping_processes[{i}].client_name", process.client_name, MAX_CLIENT_NAME_BYTES)
        member.last_seen_seconds, member.mapping_processes = now_seconds, tuple(mapping_processes)
        effects: list[Effect] = []
        if member.state is RankState.SILENT:
            self.registry.mark_present(member, RankState.READY if self._has_contents else RankState.REGISTERED)
            effects = self._resume_if_complete() if self._has_contents else self._plan_if_complete(member)
        return [*effects, self._status(member, sequence)]

    def fence(
        self,
        last_session_number: SessionNumber,
        live: Sequence[SessionNumber],
        awaiting: Collection[SessionNumber],
        killed: Sequence[SessionNumber] = (),
    ) -> list[Effect]:
        """Sends a fence: the sessions whose steps may run. Call this after "ready" was sent and when sessions end.

        A silent or lost rank gets a fence when it returns, as the pool then becomes ready again.

        Args:
            last_session_number: The newest session number.
            live: Numbers of the pool's open sessions, ascending.
            awaiting: Numbers of ended sessions. They are reported when no step of them is in flight on any rank.
            killed: Numbers of ended sessions whose processes the ranks kill.
        """
        if not self._has_contents:
            return []
        return self._fences.begin(self.epoch, last_session_number, live, awaiting, killed)

    def fenced(self, link: LinkId, sequence: int, pending: Collection[SessionNumber] = ()) -> list[Effect]:
        """Records that a rank enforces a fence and all earlier ones.

        Args:
            link: The rank's stream.
            sequence: Number of the fence.
            pending: Ended sessions of which a step may still be in flight on the rank.

        Raises:
            InvalidArgumentError: The fence was never sent, or too many sessions are pending.
            AbortedError: The rank was given up.
        """
        return self._fences.answered(self._member_of(link), sequence, pending)

    def sessions_gone(self, link: LinkId, numbers: Sequence[SessionNumber]) -> list[Effect]:
        """Ends sessions of this epoch of which a process that mapped the rank's memory has exited.

        Their blocks wait for the fence that names them as ended, as those of other sessions that are ended.

        Raises:
            InvalidArgumentError: The rank declared no memory, or there are too many numbers.
            AbortedError: The rank was given up.
        """
        member = self._member_of(link)
        if member.registration.declared is None:
            raise InvalidArgumentError("sessions_gone", "the rank declared no memory, so no engine maps it")
        check_range("sessions_gone.session_numbers", len(numbers), 0, MAX_NAMED_SESSIONS)
        return [ProcessesGone(tuple(numbers))] if self._has_contents else []

    @property
    def is_lent(self) -> bool:
        """Whether engines map the memory of all ranks."""
        return bool(self.registry) and all(member.registration.declared for member in self.registry)

    def leave(self, link: LinkId) -> list[Effect]:
        """Gives up a rank that leaves permanently.

        Raises:
            AbortedError: The rank was already given up.
        """
        return self._give_up(self._member_of(link))

    def link_broke(self, link: LinkId, now_seconds: float, *, is_expected: bool = False) -> list[Effect]:
        """Handles the end of a stream. The rank may return if it held contents; otherwise it is removed.

        Args:
            link: The stream.
            now_seconds: The current time.
            is_expected: Whether the rank left because it got no answers. It counts as seen now, and the pool serves.
        """
        member = self.registry.of_link(link)
        if member is None or member.state is RankState.LOST:
            return []
        if not self._has_contents:
            return self._give_up(member)
        if is_expected and not member.is_away:
            member.is_expected, member.last_seen_seconds = True, now_seconds
            return []
        if member.state is RankState.SILENT:
            member.state = RankState.LOST
            return []
        return self._mark_away([member], RankState.LOST, now_seconds)

    def excuse(self, now_seconds: float) -> None:
        """Counts the present ranks as seen now: the server could not answer them."""
        for member in self.registry:
            if not member.is_away:
                member.last_seen_seconds = now_seconds

    def tick(self, now_seconds: float) -> list[Effect]:
        """Marks ranks without heartbeats as silent, and gives up ranks whose grace time has passed."""
        due = [member for member in self.registry if self._due_seconds(member) <= now_seconds]
        overdue = [member for member in due if not self._has_contents or member.is_away]
        newly_away = [member for member in due if self._has_contents and not member.is_away]
        effects: list[Effect] = []
        for state, is_expected in ((RankState.LOST, True), (RankState.SILENT, False)):
            members = [member for member in newly_away if member.is_expected is is_expected]
            effects += self._mark_away(members, state, now_seconds) if members else []
        for member in overdue:
            if self.registry.of_link(member.link) is not member:
                continue  # removed together with an earlier one
            if member.state is not RankState.LOST:
                message = f"no heartbeat from rank {member.registration.rank}"
                effects.append(LinkEnded(member.link, AbortedError("RANK_GIVEN_UP", message)))
            effects += self._give_up(member)
        return effects

    def rank_group(self) -> RankGroup:
        """The state that a restarted server needs to accept the ranks again."""
        if not self._has_contents:
            return RankGroup(self.epoch, self.registry.options)
        members = self.registry.in_order()
        entries = tuple((member.registration, member.allocated) for member in members if member.allocated)
        return RankGroup(self.epoch, self.registry.options, self._plan, entries)

    def restore(
        self, rank_group: RankGroup, links: Iterable[LinkId], now_seconds: float, *, expects_ranks: bool = False
    ) -> None:
        """Restores the state of an earlier server process, whose ranks register again.

        Args:
            rank_group: The state of the ranks.
            links: An unused number for each rank; no stream ever gets it.
            now_seconds: The current time, at which the grace time starts.
            expects_ranks: Whether the ranks count as seen now, so that the pool serves while they register: their
                server has just been replaced. If not, all ranks are lost and may return.
        """
        self.epoch, self.state = rank_group.epoch, PoolState.DEGRADED
        if rank_group.plan is None:
            return
        self._plan, self._has_contents = rank_group.plan, True
        self.registry.reset(len(rank_group.members), rank_group.options)
        for (registration, allocated), link in zip(rank_group.members, links, strict=False):
            state = RankState.READY if expects_ranks else RankState.REGISTERED
            member = Member(registration, link, now_seconds, state, allocated=allocated, is_expected=expects_ranks)
            self.registry.add(member)
            if not expects_ranks:
                self.registry.mark_away(member, RankState.LOST, now_seconds)
        if expects_ranks:
            self.state = PoolState.READY

    def _due_seconds(self, member: Member) -> float:
        if member.is_away:
            return member.away_seconds + self._timing.grace_seconds
        return member.last_seen_seconds + self._timing.heartbeat_timeout_seconds

    def _member_of(self, link: LinkId) -> Member:
        member = self.registry.of_link(link)
        if member is None:
            raise AbortedError("RANK_GIVEN_UP", "this stream's rank was given up; join again")
        return member

    def _check_successor(self, before: Member, now_seconds: float) -> None:
        rank = f"rank {before.registration.rank} of pool {self.name!r}"
        missed = now_seconds - before.last_seen_seconds > 2 * self._timing.heartbeat_seconds
        may_return = before.state is RankState.SILENT or before.is_expected or missed
        if may_return and before.state is not RankState.LOST:
            left = max(self._due_seconds(before) - now_seconds, 0.0)
            message = f"{rank} is silent and may return within {left:.1f} s"
            raise UnavailableError("RANK_SILENT", message, retry_seconds=min(left, 1.0))
        if before.state is not RankState.LOST:
            raise WrongStateError(
                "RANK_TAKEN",
                f"{rank} is process {before.registration.pid} on {before.registration.host or 'its host'}, and alive",
                field="register.rank",
            )

    def _reconnect(self, before: Member, member: Member) -> list[Effect]:
        effects: list[Effect] = []
        if before.state is not RankState.LOST:
            error = AbortedError("STREAM_SUPERSEDED", "a newer stream of this rank replaced this one")
            effects.append(LinkEnded(before.link, error))
        registration, earlier = member.registration, before.registration
        allocated, held = before.allocated, registration.held
        is_intact = self._has_contents and allocated and held == HeldTensors(self.epoch, allocated.num_blocks)
        is_unchanged = all(getattr(registration, name) == getattr(earlier, name) for name in _KEPT_BY_A_RETURN)
        if not is_intact or not is_unchanged:
            return effects + self._give_up(before) + self._add_member(member)
        member.allocated, member.state = allocated, RankState.READY
        member.fence_sent, member.fence_answered = before.fence_sent, before.fence_answered
        member.fence_pending = before.fence_pending
        self.registry.remove(before)
        self.registry.add(member)
        if self._plan and self.state is PoolState.READY:  # a second stream, opened before the first was missed
            return [*effects, *self._ready(self._plan, member)]
        return effects + (self._resume_if_complete() or [self._status(member)])

    def _add_member(self, member: Member) -> list[Effect]:
        """Adds a rank. The first rank of a new group decides what later ranks must agree with."""
        if not self.registry:
            self.registry.reset(member.registration.world_size, member.registration.options)
        self.registry.add(member)
        return self._plan_if_complete(member) or [self._status(member)]

    def _plan_if_complete(self, newest: Member) -> list[Effect]:
        if not self.registry.is_complete:
            return []
        try:
            plan = self._make_plan()
        except KvpoolError as error:
            return self._end_streams(error, self._at_fault(error, newest))
        last_epoch = max(member.registration.last_epoch for member in self.registry)
        next_epoch = self.epoch + 1 if self._plan else self.epoch
        self.epoch = max(next_epoch, last_epoch + 1)
        self._plan = plan
        effects: list[Effect] = []
        for member, config in zip(self.registry.in_order(), plan.configs, strict=True):
            member.state = RankState.ALLOCATING
            effects.append(MessageSent(member.link, Planned(self.epoch, config, plan.max_model_len)))
        return effects

    def _make_plan(self, num_blocks: int = 0) -> Plan:
        ranks = self.registry.registrations()
        plan = pool_plan.make_plan(ranks, num_blocks)
        for field, count in (
            (pool_plan.num_blocks_field(ranks), plan.num_blocks),
            ("register.num_host_blocks", plan.num_blocks + pool_plan.num_host_blocks(ranks)),
        ):
            if count > self._max_blocks:
                message = f"{count} blocks fit, the limit per pool is {self._max_blocks}: set fewer blocks"
                raise InvalidArgumentError(field, message, reason="TOO_MANY_BLOCKS")
        self._check(pool_plan.pool_config(self.name, ranks, plan), pool_plan.num_blocks_field(ranks))
        return plan

    def _open(self, plan: Plan) -> list[Effect]:
        """Opens the pool with the smallest number of blocks that a rank allocated."""
        allocations = [(member, member.allocated.num_blocks) for member in self.registry if member.allocated]
        fewest = min(num_blocks for _, num_blocks in allocations)
        if fewest < plan.num_blocks:
            try:
                plan = self._make_plan(fewest)
            except KvpoolError as error:
                at_fault = [member for member, blocks in allocations if blocks == fewest or not self.was_open]
                return self._end_streams(error, at_fault)
        self._plan = plan
        self._has_contents = True
        self.state = PoolState.READY
        config = pool_plan.pool_config(self.name, self.registry.registrations(), plan)
        opened = PoolOpened(config, self.epoch, self._fences.are_answered)
        return [opened, *self._ready(plan, *self.registry)]

    def _at_fault(self, error: KvpoolError, newest: Member) -> list[Member]:
        """Returns the ranks to remove when planning fails; if the pool was open, the other ranks keep their tensors."""
        if not self.was_open:
            return list(self.registry)
        rank = error.rank if isinstance(error, PlanError) else None
        member = None if rank is None else self.registry.of_rank(rank)
        return [member or newest]

    def _end_streams(self, error: KvpoolError, at_fault: Iterable[Member]) -> list[Effect]:
        """Ends the streams of ranks for which no plan can be made, and gives the ranks up."""
        effects: list[Effect] = []
        for member in at_fault:
            effects += [LinkEnded(member.link, error), *self._give_up(member)]
        return effects

    def _mark_away(self, members: Iterable[Member], state: RankState, now_seconds: float) -> list[Effect]:
        """Marks ranks as silent or lost. The first change is sent to the others; later ones only answer heartbeats."""
        for member in members:
            self.registry.mark_away(member, state, now_seconds)
        if self.state is not PoolState.READY:
            return []
        self.state = PoolState.DEGRADED
        return [PoolSuspended(), *self._statuses()]

    def _resume_if_complete(self) -> list[Effect]:
        if self._plan is None or not self.registry.is_complete:
            return []
        self.state = PoolState.READY
        return [PoolResumed(), *self._ready(self._plan, *self.registry)]

    def _give_up(self, member: Member) -> list[Effect]:
        """Removes a rank. The contents of all ranks in this epoch become invalid.

        Other lost ranks are removed too. A silent rank stays, as it may still answer the next plan.
        """
        self.registry.remove(member)
        for other in self.registry:
            if other.state is RankState.LOST:
                self.registry.remove(other)
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

    def _ready(self, plan: Plan, *members: Member) -> list[Effect]:
        num_host_blocks = pool_plan.num_host_blocks(self.registry.registrations())
        message = Ready(self.epoch, plan.num_blocks, plan.max_model_len, num_host_blocks)
        return [MessageSent(member.link, message) for member in members]

    def _status(self, member: Member, sequence: int = 0) -> Effect:
        absent = self.registry.first_absent(MAX_REPORTED_ABSENT_RANKS)
        return MessageSent(member.link, PoolStatus(self.state, self.epoch, absent, sequence))

    def _statuses(self) -> list[Effect]:
        return [self._status(member) for member in self.registry if member.state is not RankState.LOST]
