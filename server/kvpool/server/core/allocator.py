"""All pools and sessions of a server.

1. A pool's name stands for one configuration until it is removed, or until its ranks form it anew.
2. A session id names one session for ever; one that was ended is told apart from one that never was.
3. Time, ids and random bytes come in as arguments.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from kvpool.server.core import apply
from kvpool.server.core.config import PoolConfig
from kvpool.server.core.errors import AbortedError, InvalidArgumentError, NotFoundError, WrongStateError
from kvpool.server.core.inspection import named
from kvpool.server.core.intake import Intake
from kvpool.server.core.pool import Pool
from kvpool.server.core.residency import Residency
from kvpool.server.core.session import Session
from kvpool.server.core.specs import KIND_NAMES, allocation_spec
from kvpool.server.core.statistics import ActivityCounters, PrefixCacheStats
from kvpool.server.core.step import Step, StepResult
from kvpool.server.core.types import GroupId, PoolName, SessionId, WriterId
from kvpool.server.core.world import PoolState, RankInfo

DEFAULT_LEASE_SECONDS: Final = 10.0
MIN_LEASE_SECONDS: Final = 1.0
MAX_LEASE_SECONDS: Final = 3600.0
REMEMBERED_ENDS: Final = 4096
_ENDS: Final = {
    "LEASE_EXPIRED": "the session's lease ran out; its blocks are free again",
    "EPOCH_PASSED": "a rank of the pool was lost, and what its blocks held; open a new session, compute again",
    "SESSION_EVICTED": "an operator ended the session; its blocks are free again",
}
"""By reason: what became of a session that did not close itself."""


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group of a pool as it is at one moment.

    Attributes:
        kind: What kind of attention it is, as vLLM's events call it.
        used_blocks: Held by requests or set aside for sinks; each once, however many requests share it.
        cached_blocks: Blocks whose contents can be found by hash.
        allocated_blocks: Blocks taken from the free list, since the pool was created.
        evicted_blocks: Cached blocks given up to make room, since the pool was created.
    """

    kind: str
    used_blocks: int
    cached_blocks: int
    allocated_blocks: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """A pool as it is at one moment.

    Attributes:
        config: What it was declared with.
        epoch: Goes up whenever the contents of blocks can no longer be trusted.
        free_blocks: Blocks that can be given, cached ones included.
        cached_blocks: Blocks whose contents can be found by hash.
        usage: Fraction of the blocks, the null block apart, that requests hold or that are set aside for sinks.
        prefix_cache: Counters of look-ups.
        recent_hit_rate: Hit rate over the last 1,000 look-ups.
        evicted_blocks: Cached blocks given up to make room.
        preemptions: Times that a request's blocks were taken back.
        sessions: Open sessions.
        requests: Requests of all sessions.
        event_sequence: Number of the newest batch of events; 0 if there was none.
        sink_blocks: Blocks set aside for sinks: 1, 2, ..., group by group.
        state: Whether it serves.
        ranks: How its ranks are; none if a scheduler declared it.
        running_requests: Of the requests, those that hold blocks.
        activity: What it did so far.
        groups: Its groups, in their order.
    """

    config: PoolConfig
    epoch: int
    free_blocks: int
    cached_blocks: int
    usage: float
    prefix_cache: PrefixCacheStats
    recent_hit_rate: float
    evicted_blocks: int
    preemptions: int
    sessions: int
    requests: int
    event_sequence: int = 0
    sink_blocks: int = 0
    state: PoolState = PoolState.READY
    ranks: tuple[RankInfo, ...] = ()
    running_requests: int = 0
    activity: ActivityCounters = field(default_factory=ActivityCounters)
    groups: tuple[GroupInfo, ...] = ()


class Allocator:
    """Pools by name and sessions by id.

    Args:
        new_residency: Makes what samples how long the blocks of a new pool keep what they hold.

    Attributes:
        intake: Which pools take new sessions.
    """

    def __init__(self, new_residency: Callable[[], Residency | None] = lambda: None) -> None:
        self.intake = Intake()
        self._new_residency = new_residency
        self._pools: dict[PoolName, Pool] = {}
        self._sessions: dict[SessionId, tuple[Pool, Session]] = {}
        self._ended: OrderedDict[SessionId, str] = OrderedDict()
        self._last_writer = 0

    def __repr__(self) -> str:
        return f"<Allocator: {len(self._pools)} pools, {len(self._sessions)} sessions>"

    def create_pool(self, config: PoolConfig, none_hash: bytes) -> tuple[Pool, bool]:
        """Makes a pool, or finds the one that was declared alike. O(num_blocks).

        Args:
            config: The pool.
            none_hash: Random bytes, for a pool that leaves its none_hash open.

        Returns:
            The pool, and whether it is new.

        Raises:
            InvalidArgumentError: The configuration is out of range.
            WrongStateError: The name is taken by a pool that differs; names the field.
        """
        config.check()
        pool = self._pools.get(config.name)
        if pool is None:
            if not config.hash_scheme.none_hash:
                config = replace(config, hash_scheme=replace(config.hash_scheme, none_hash=none_hash))
            pool = self._pools[config.name] = Pool(config, residency=self._new_residency())
            return pool, True
        difference = pool.config.difference(config)
        if difference:
            raise WrongStateError(
                "POOL_DIFFERS",
                f"pool {config.name!r} is there already and differs in this field",
                field=f"config.{difference}",
            )
        return pool, False

    def open_epoch(self, config: PoolConfig, none_hash: bytes, epoch: int) -> Pool:
        """Opens a pool that ranks have formed, or opens it anew, with nothing in it. O(num_blocks).

        Args:
            config: The pool; of one opened anew it may differ from before.
            none_hash: Random bytes, for a pool that leaves its none_hash open.
            epoch: The epoch that begins, higher than any before.

        Raises:
            InvalidArgumentError: The configuration is out of range.
        """
        if not config.hash_scheme.none_hash:
            config = replace(config, hash_scheme=replace(config.hash_scheme, none_hash=none_hash))
        pool = self._pools.get(config.name)
        if pool is None:
            pool = self._pools[config.name] = Pool(config, epoch, self._new_residency())
        else:
            pool.begin_epoch(config, epoch)
        pool.is_suspended = False
        return pool

    def pass_epoch(self, pool: Pool, epoch: int) -> list[Session]:
        """Ends all sessions of a pool that lost a rank, and drops what its blocks held; it stays suspended.

        Returns:
            The sessions that were open.
        """
        sessions = self.sessions_of(pool)
        for session in sessions:
            self._end(session.session_id, "EPOCH_PASSED")
        pool.activity.epoch_ends += len(sessions)
        pool.is_suspended = True
        pool.begin_epoch(pool.config, epoch)
        return sessions

    def suspend(self, pool: Pool) -> None:
        """Lets nothing be allocated from a pool for now, as a rank is missing."""
        pool.is_suspended = True
        pool.activity.suspensions += 1

    def resume(self, pool: Pool) -> None:
        """Lets a suspended pool go on."""
        pool.is_suspended = False

    def reset_prefix_cache(self, pool: Pool) -> bool:
        """Forgets what a pool has cached, as an operator asks; see `Pool.reset_prefix_cache`."""
        return pool.reset_prefix_cache()

    def drain(self, name: PoolName | None) -> None:
        """Takes no new sessions; see `Intake.close`."""
        self.intake.close(name)

    def undrain(self, name: PoolName | None) -> None:
        """Takes sessions again; see `Intake.open`."""
        self.intake.open(name)

    def has_pool(self, name: PoolName) -> bool:
        """Whether there is a pool of this name."""
        return name in self._pools

    def pool(self, name: str) -> Pool:
        """Finds a pool.

        Raises:
            NotFoundError: There is none of this name.
        """
        pool = self._pools.get(PoolName(name))
        if pool is None:
            raise NotFoundError("POOL_NOT_FOUND", f"no pool {name!r}", field="pool_name")
        return pool

    def open_session(
        self, pool_name: str, client_name: str, lease_seconds: float, *, session_id: SessionId, now_seconds: float
    ) -> tuple[Pool, Session]:
        """Attaches a scheduler process to a pool.

        Raises:
            InvalidArgumentError: The lease or the client's name is out of range.
            NotFoundError: There is no such pool.
            UnavailableError: The pool is drained or suspended.
        """
        lease_seconds = lease_seconds or DEFAULT_LEASE_SECONDS
        if not MIN_LEASE_SECONDS <= lease_seconds <= MAX_LEASE_SECONDS:
            raise InvalidArgumentError(
                "lease_seconds", f"{lease_seconds} is not in [{MIN_LEASE_SECONDS:g}, {MAX_LEASE_SECONDS:g}]"
            )
        if len(client_name.encode("utf-8", "surrogatepass")) > 256:  # noqa: PLR2004 - the proto states it
            raise InvalidArgumentError("client_name", "longer than 256 bytes")
        pool = self.pool(pool_name)
        self.intake.check(pool.config.name)
        pool.check_serving()
        self._last_writer += 1
        session = Session(session_id, WriterId(self._last_writer), client_name, lease_seconds, now_seconds)
        self._sessions[session_id] = (pool, session)
        pool.sessions[session_id] = session
        pool.activity.sessions_opened += 1
        return pool, session

    def session(self, session_id: str, now_seconds: float) -> tuple[Pool, Session]:
        """Finds a session, which is heard of by that.

        Raises:
            NotFoundError: There never was one of this id, or it was closed.
            AbortedError: Its lease ran out, the epoch passed, or an operator ended it.
        """
        found = self._sessions.get(SessionId(session_id))
        if found is None:
            if session_id in self._ended:
                raise ended_error(self._ended[SessionId(session_id)])
            raise NotFoundError("SESSION_NOT_FOUND", "no such session", field="session_id")
        if found[1].expires_seconds <= now_seconds:  # `expire` will free its blocks, and tell
            raise ended_error("LEASE_EXPIRED")
        found[1].heard_seconds = now_seconds
        return found

    def apply(self, pool: Pool, session: Session, step: Step, source: object = None) -> StepResult:
        """Applies a step of a session that `session` found; see `apply_step`."""
        return apply.apply_step(pool, session, step, source)

    def count_retry(self, pool: Pool) -> None:
        """Counts a change that came again, and was answered from memory by the caller."""
        pool.activity.retries += 1

    def mark_executed(self, pool: Pool, session: Session, executed_sequence: int) -> None:
        """Lets others hit what the session filled up to a change that it says was executed.

        Raises:
            InvalidArgumentError: It was not sent yet.
        """
        session.check_executed(executed_sequence, session.sequence)
        apply.mark_executed(pool, session, executed_sequence)

    def close_session(self, session_id: str, now_seconds: float) -> tuple[Pool, int]:
        """Frees a session's requests and forgets it.

        Returns:
            Its pool, and how many requests were freed.

        Raises:
            NotFoundError: There is no such session.
            AbortedError: Its lease ran out.
        """
        pool, session = self.session(session_id, now_seconds)
        del self._sessions[session.session_id]
        del pool.sessions[session.session_id]
        pool.activity.sessions_closed += 1
        return pool, apply.end_session(pool, session)

    def evict_session(self, pool_name: str, number: int) -> tuple[Pool, Session]:
        """Ends a session as an operator asks, and frees its requests.

        Returns:
            Its pool, and the session.

        Raises:
            NotFoundError: There is no such pool, or no session of this number in it.
        """
        pool, session = self.find_session(pool_name, number)
        self._end(session.session_id, "SESSION_EVICTED")
        pool.activity.evicted_sessions += 1
        apply.end_session(pool, session)
        return pool, session

    def find_session(self, pool_name: str, number: int) -> tuple[Pool, Session]:
        """Finds a session by its number, which is not heard of by that. O(sessions).

        Raises:
            NotFoundError: There is no such pool, or no session of this number in it.
        """
        pool = self.pool(pool_name)
        session = next((session for session in self.sessions_of(pool) if session.writer == number), None)
        if session is None:
            message = f"pool {pool_name!r} has no session {number}"
            raise NotFoundError("SESSION_NOT_FOUND", message, field="session_number")
        return pool, session

    def remove_pool(self, name: str) -> None:
        """Forgets a pool; the caller has made sure that no rank of it is there or waited for.

        Raises:
            NotFoundError: There is none of this name.
            WrongStateError: It has sessions; names some.
        """
        pool = self.pool(name)
        sessions = self.sessions_of(pool)
        if sessions:
            message = f"sessions are open: {named([session.writer for session in sessions])}"
            raise WrongStateError("POOL_IN_USE", message, field="pool_name")
        del self._pools[pool.config.name]
        self.intake.open(pool.config.name)

    def expire(self, now_seconds: float) -> list[tuple[Pool, Session, int]]:
        """Ends the sessions whose lease has run out.

        Returns:
            For each its pool, itself, and how many requests were freed.
        """
        due = [sid for sid, (_, session) in self._sessions.items() if session.expires_seconds <= now_seconds]
        return [self.expire_session(session_id) for session_id in due]

    def expire_session(self, session_id: SessionId) -> tuple[Pool, Session, int]:
        """Ends an open session as its lease has run out; see `expire`."""
        pool, session = self._end(session_id, "LEASE_EXPIRED")
        pool.activity.leases_expired += 1
        return pool, session, apply.end_session(pool, session)

    def renew_leases(self, now_seconds: float) -> None:
        """Gives every open session its whole lease from now, without a stream: this process did not listen before."""
        for _, session in self._sessions.values():
            session.open_streams = 0
            session.heard_seconds = now_seconds

    def next_expiry_seconds(self) -> float:
        """When the next lease runs out, as things stand; infinity if none does."""
        return min((session.expires_seconds for _, session in self._sessions.values()), default=float("inf"))

    def pools(self) -> Iterator[Pool]:
        """All pools, in the order they were made."""
        return iter(self._pools.values())

    @property
    def num_sessions(self) -> int:
        """Open sessions of all pools."""
        return len(self._sessions)

    def sessions(self) -> Iterator[tuple[Pool, Session]]:
        """All open sessions with their pools, in the order they were opened, which is that of their numbers."""
        return iter(self._sessions.values())

    def sessions_of(self, pool: Pool) -> list[Session]:
        """The open sessions of a pool, in the order they were opened."""
        return list(pool.sessions.values())

    def describe(self, pool: Pool, event_sequence: int = 0) -> PoolInfo:
        """Tells what a pool is like now. O(its sessions and requests)."""
        sessions = self.sessions_of(pool)
        return PoolInfo(
            config=pool.config,
            epoch=pool.epoch,
            free_blocks=pool.blocks.num_free_blocks,
            cached_blocks=len(pool.blocks.prefix_map),
            usage=pool.blocks.usage,
            prefix_cache=replace(pool.stats),
            recent_hit_rate=pool.recent_hit_rate.rate,
            evicted_blocks=pool.blocks.num_evicted,
            preemptions=pool.num_preemptions,
            sessions=len(sessions),
            requests=sum(len(session.requests) for session in sessions),
            event_sequence=event_sequence,
            sink_blocks=len(pool.sink_blocks),
            state=self._state_of(pool),
            running_requests=sum(
                sum(1 for request in session.requests.values() if request.num_computed_tokens) for session in sessions
            ),
            activity=replace(pool.activity),
            groups=tuple(_describe_group(pool, GroupId(i)) for i in range(len(pool.config.groups))),
        )

    def _state_of(self, pool: Pool) -> PoolState:
        if not self.intake.takes(pool.config.name):
            return PoolState.DRAINING
        return PoolState.DEGRADED if pool.is_suspended else PoolState.READY

    def _end(self, session_id: SessionId, reason: str) -> tuple[Pool, Session]:
        self._ended[session_id] = reason
        if len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        pool, session = self._sessions.pop(session_id)
        del pool.sessions[session_id]
        return pool, session


def _describe_group(pool: Pool, group_id: GroupId) -> GroupInfo:
    counters = pool.blocks.group_counters[group_id]
    return GroupInfo(
        kind=KIND_NAMES[type(allocation_spec(pool.config.groups[group_id].spec))],
        used_blocks=counters.used_blocks,
        cached_blocks=pool.blocks.prefix_map.num_cached(group_id),
        allocated_blocks=counters.allocated_blocks,
        evicted_blocks=counters.evicted_blocks,
    )


def ended_error(reason: str) -> AbortedError:
    """What a session is told that was ended for one of the reasons above."""
    return AbortedError(reason, _ENDS[reason], field="session_id")
