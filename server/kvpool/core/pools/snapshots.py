"""Snapshots of pools and of the state: values from which equal objects can be made. See `kvpool.core.snapshots`."""

from collections.abc import Sized
from dataclasses import dataclass, replace
from itertools import chain

from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.block_pool import BlockPoolSnapshot
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.steps_in_flight import KeptBlock
from kvpool.core.ids import PoolName, SessionId, SessionNumber
from kvpool.core.ranks.messages import RankGroup
from kvpool.core.sessions.quarantine import Quarantined
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import RememberedResult, Session
from kvpool.core.sessions.session_ends import RememberedEnd
from kvpool.core.snapshots import Column
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.statistics import ActivityCounters, PrefixCacheStats


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool at one moment.

    Left out: unpublished events, as watchers of another process begin again; the sample of block lifetimes, which each
    process draws; quotas, which follow from the sessions.

    Attributes:
        sessions: The open sessions, ordered by number.
        quarantined: The sessions in quarantine, in order.
        requests: The requests of all these sessions, in order.
        results: The results that these sessions remember, each with the session's number, in order.
        kept: The blocks that are kept for steps in flight.
        lookups: See `RecentHitRate`.
    """

    config: PoolConfig
    owner: str
    epoch: int
    memory_id: str
    is_suspended: bool
    ranks_fence: bool
    blocks: BlockPoolSnapshot
    sessions: Column[Session]
    quarantined: Column[Quarantined]
    requests: Column[Request]
    results: Column[tuple[SessionNumber, RememberedResult]]
    kept: Column[KeptBlock]
    stats: PrefixCacheStats
    activity: ActivityCounters
    lookups: list[tuple[int, int]]
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The state of a server at one moment; see `State`.

    Attributes:
        keyed_sessions: The session that each open key opened.
    """

    pools: list[PoolSnapshot]
    rank_groups: Column[tuple[PoolName, RankGroup]]
    past_epoch: int
    is_server_drained: bool
    drained_pools: set[PoolName]
    keyed_sessions: list[SessionId]
    ends: Column[RememberedEnd]
    is_incomplete: bool
    lost_may_run: bool
    last_session_number: int


def pool_snapshot(pool: KVCacheManager) -> PoolSnapshot:
    """The pool at this moment; read it before `end_pool_snapshot`. O(sessions)."""
    sessions = _sessions_of(pool)
    results = [(session.session_number, each) for session in sessions for each in session.results.values()]
    return PoolSnapshot(
        config=pool.config,
        owner=pool.owner,
        epoch=pool.epoch,
        memory_id=pool.memory_id,
        is_suspended=pool.is_suspended,
        ranks_fence=pool.ranks_fence,
        blocks=pool.blocks.snapshot(),
        sessions=Column([session.freeze() for session in pool.sessions.values()], slice_length=64),
        quarantined=Column([replace(each, session=each.session.freeze()) for each in pool.quarantine], slice_length=64),
        requests=Column(chain.from_iterable([session.copy_requests() for session in sessions]), slice_length=1),
        results=Column(results, slice_length=1),
        kept=Column([each for kept in pool.in_flight.kept.values() for each in kept.values()]),
        stats=replace(pool.stats),
        activity=replace(pool.activity),
        lookups=pool.recent_hit_rate.lookups(),
        num_preemptions=pool.num_preemptions,
    )


def end_pool_snapshot(pool: KVCacheManager) -> None:
    """Ends a snapshot. The rest of it can no longer be read."""
    pool.blocks.end_snapshot()
    for session in _sessions_of(pool):
        session.requests_copy = None


def _sessions_of(pool: KVCacheManager) -> list[Session]:
    return [*pool.sessions.values(), *(each.session for each in pool.quarantine)]


def restored_pool(
    snapshot: PoolSnapshot, block_lifetimes: BlockLifetimes | None, sample_key: bytes = b""
) -> KVCacheManager:
    """Makes a pool as it was. O(blocks ever used + sessions + requests).

    Raises:
        InvalidArgumentError: The configuration is out of range.
        ValueError: The parts of the snapshot do not belong together. Blocks that are not in it are not allocated.
        LookupError: As ValueError.
    """
    column = snapshot.blocks.free_list.column.values
    if not isinstance(column, Sized) or not 0 < len(column) <= snapshot.config.num_blocks:
        raise ValueError(f"it does not have the {snapshot.config.num_blocks} blocks of pool {snapshot.config.name!r}")
    pool = KVCacheManager(snapshot.config, snapshot.epoch, block_lifetimes, snapshot.owner, sample_key)
    pool.memory_id = snapshot.memory_id
    pool.is_suspended = snapshot.is_suspended
    pool.ranks_fence = snapshot.ranks_fence
    pool.blocks.restore(snapshot.blocks, len(column))
    pool.stats, pool.activity = snapshot.stats, snapshot.activity
    pool.num_preemptions = snapshot.num_preemptions
    for lookup in snapshot.lookups:
        pool.recent_hit_rate.observe(*lookup)
    pool.sessions.update((session.session_number, session) for session in snapshot.sessions.values)
    for quarantined in snapshot.quarantined.values:
        pool.quarantine.add(quarantined)
    sessions = _sessions_of(pool)
    by_number = {session.session_number: session for session in sessions}
    for request in snapshot.requests.values:
        by_number[request.session_number].restore_request(request)
        pool.state_readers.record(request)
    for number, remembered in snapshot.results.values:
        by_number[number].restore_result(remembered)
    pool.in_flight.restore(snapshot.kept.values)
    pool.quotas.restore(sessions)
    return pool
