"""Snapshots of a pool's state, for readers."""

from dataclasses import dataclass, field, replace
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import GroupId
from kvpool.core.ranks.messages import PoolState, RankInfo
from kvpool.core.specs.kinds import KIND_NAMES, allocation_spec
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.statistics import ActivityCounters, MissReason, PrefixCacheStats

MAX_LISTED_VERSIONS: Final = 16


@dataclass(frozen=True, slots=True)
class MissCount:
    """Counted look-ups that a group ended early for one reason, see `GroupCounters`.

    Attributes:
        reason: The reason.
        lookups: Number of look-ups.
        tokens: Tokens that they missed.
    """

    reason: MissReason
    lookups: int
    tokens: int


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The state of a group at one moment.

    Attributes:
        kind: Kind of attention, named as in vLLM's events.
        used_blocks: Blocks held by requests or reserved for sinks; a shared block counts once.
        cached_blocks: Blocks that can be found by hash.
        allocated_blocks: Blocks taken from the free list since the pool was created.
        evicted_blocks: Cached blocks evicted since the pool was created.
        misses: Look-ups that the group ended early, by reason; without reasons that have none.
    """

    kind: str
    used_blocks: int
    cached_blocks: int
    allocated_blocks: int
    evicted_blocks: int
    misses: tuple[MissCount, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """The state of a pool at one moment.

    Attributes:
        config: Configuration of the pool.
        epoch: The epoch; increases whenever the contents of blocks become invalid.
        free_blocks: Blocks that can be allocated, including cached ones.
        cached_blocks: Blocks that can be found by hash.
        usage: Fraction of the blocks, without the null block, that requests hold or that are reserved for sinks.
        prefix_cache: Counters of look-ups.
        recent_hit_rate: Hit rate over the last 1,000 look-ups.
        evicted_blocks: Number of evicted cached blocks.
        preemptions: Number of preemptions.
        sessions: Number of open sessions.
        requests: Number of requests of all sessions.
        event_sequence: Number of the newest batch of events; 0 if there was none.
        sink_blocks: Number of blocks reserved for sinks; their ids are 1, 2, ..., by group.
        state: State of the pool.
        ranks: State of each rank; empty if a scheduler declared the pool.
        running_requests: Number of requests that hold blocks.
        activity: Counters of the pool's activity.
        groups: State of each group, in order.
        quarantined_blocks: Blocks of ended sessions that are not yet free, since a last step may still run.
        quarantined_sessions: Ended sessions whose blocks are not yet free.
        reserved_blocks: Blocks of free_blocks that are available only to sessions with a minimum.
        memory_id: The memory that holds the blocks, as named by sessions; empty if it is unknown.
        fingerprint: What the contents of the memory depend on, as the ranks declare it: pairs of a name and a value.
        weights_versions: The weights versions of the open sessions, sorted, the first MAX_LISTED_VERSIONS.
    """

    config: PoolConfig
    epoch: int
    free_blocks: int = 0
    cached_blocks: int = 0
    usage: float = 0.0
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    recent_hit_rate: float = 0.0
    evicted_blocks: int = 0
    preemptions: int = 0
    sessions: int = 0
    requests: int = 0
    event_sequence: int = 0
    sink_blocks: int = 0
    state: PoolState = PoolState.READY
    ranks: tuple[RankInfo, ...] = ()
    running_requests: int = 0
    activity: ActivityCounters = field(default_factory=ActivityCounters)
    groups: tuple[GroupInfo, ...] = ()
    quarantined_blocks: int = 0
    quarantined_sessions: int = 0
    reserved_blocks: int = 0
    memory_id: str = ""
    fingerprint: tuple[tuple[str, str], ...] = ()
    weights_versions: tuple[str, ...] = ()


def describe_pool(pool: KVCacheManager, state: PoolState, event_sequence: int) -> PoolInfo:
    """Describes the current state of a pool. O(its sessions and requests)."""
    sessions = list(pool.sessions.values())
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
        state=state,
        running_requests=sum(
            sum(1 for request in session.requests.values() if request.num_computed_tokens) for session in sessions
        ),
        activity=replace(pool.activity),
        groups=tuple(_describe_group(pool, GroupId(i)) for i in range(len(pool.config.groups))),
        quarantined_blocks=pool.quarantine.num_blocks,
        quarantined_sessions=len(pool.quarantine),
        reserved_blocks=pool.quotas.num_reserved,
        memory_id=pool.memory_id,
        weights_versions=tuple(sorted({session.weights_version for session in sessions})[:MAX_LISTED_VERSIONS]),
    )


def _describe_group(pool: KVCacheManager, group_id: GroupId) -> GroupInfo:
    counters = pool.blocks.group_counters[group_id]
    return GroupInfo(
        kind=KIND_NAMES[type(allocation_spec(pool.config.groups[group_id].spec))],
        used_blocks=counters.used_blocks,
        cached_blocks=pool.blocks.prefix_map.num_cached(group_id),
        allocated_blocks=counters.allocated_blocks,
        evicted_blocks=counters.evicted_blocks,
        misses=tuple(
            MissCount(reason, counters.misses[reason], counters.missed_tokens[reason])
            for reason in MissReason
            if reason in counters.misses
        ),
    )
