"""What a pool is like at one moment, for all who only look."""

from dataclasses import dataclass, field, replace

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import GroupId
from kvpool.core.ranks.messages import PoolState, RankInfo
from kvpool.core.specs.kinds import KIND_NAMES, allocation_spec
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.statistics import ActivityCounters, PrefixCacheStats


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
        quarantined_blocks: Blocks that ended sessions held, not yet free since a step of theirs may still run.
        quarantined_sessions: Sessions that have ended, whose blocks are not yet free.
        reserved_blocks: Of free_blocks, those that only sessions with a minimum can be given.
        memory_id: The memory that all it holds is in, as its sessions named it; empty if that is not known.
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
    quarantined_blocks: int = 0
    quarantined_sessions: int = 0
    reserved_blocks: int = 0
    memory_id: str = ""


def describe_pool(pool: KVCacheManager, state: PoolState, event_sequence: int) -> PoolInfo:
    """Tells what a pool is like now. O(its sessions and requests)."""
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
    )


def _describe_group(pool: KVCacheManager, group_id: GroupId) -> GroupInfo:
    counters = pool.blocks.group_counters[group_id]
    return GroupInfo(
        kind=KIND_NAMES[type(allocation_spec(pool.config.groups[group_id].spec))],
        used_blocks=counters.used_blocks,
        cached_blocks=pool.blocks.prefix_map.num_cached(group_id),
        allocated_blocks=counters.allocated_blocks,
        evicted_blocks=counters.evicted_blocks,
    )
