"""What Prometheus is told of pools. Names, units and help texts stand here; docs/reference/metrics.md lists them.

Label values are bounded: pools by `--max-pools`, groups by their pool, all others are listed in the code.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from kvpool.core.block_lifetimes import BOUNDS_SECONDS
from kvpool.core.ranks.messages import PoolState, RankState
from kvpool.core.statistics import Histogram
from kvpool.core.views.pool_info import GroupInfo, PoolInfo
from kvpool.server.metrics.observations import OPERATION_BOUNDS, STEP_BOUNDS_SECONDS, PublisherCounts


@dataclass(frozen=True, slots=True)
class Measures:
    """A pool's histograms; None where nothing was measured yet.

    Attributes:
        lifetime: Seconds from a block being taken to its eviction.
        idle: Seconds from a block's last access to its eviction.
        reuse_gap: Seconds between two accesses of a block.
        step_seconds: Server time of a step.
        step_operations: Operations of a step.
    """

    lifetime: Histogram | None = None
    idle: Histogram | None = None
    reuse_gap: Histogram | None = None
    step_seconds: Histogram | None = None
    step_operations: Histogram | None = None


@dataclass(frozen=True, slots=True)
class PoolSample:
    """A pool at the moment of a scrape.

    Attributes:
        info: How it is.
        measures: Its histograms.
        published: What its publisher did; None if its events are not published over ZeroMQ.
    """

    info: PoolInfo
    measures: Measures
    published: PublisherCounts | None = None


@dataclass(frozen=True, slots=True)
class _Value:
    """One sample a pool: a counter if its name ends in _total, else a gauge."""

    name: str
    help: str
    read: Callable[[PoolInfo], float]


def _usable(info: PoolInfo) -> int:
    return max(info.config.num_blocks - 1, 0)


_VALUES: Final = (
    _Value("kvpool_pool_epoch", "Goes up whenever what blocks held is lost.", lambda info: info.epoch),
    _Value(
        "kvpool_pool_blocks", "Blocks that can be used; free and used ones add up to them (null block apart).", _usable
    ),
    _Value("kvpool_pool_free_blocks", "Blocks that can be given now, cached ones included.", lambda i: i.free_blocks),
    _Value(
        "kvpool_pool_used_blocks",
        "Blocks that requests hold or that are set aside for sinks.",
        lambda info: _usable(info) - info.free_blocks,
    ),
    _Value(
        "kvpool_pool_cached_blocks",
        "Blocks, used or free, whose contents can be found again by their hash.",
        lambda info: info.cached_blocks,
    ),
    _Value("kvpool_pool_usage_ratio", "Used blocks for each that can be used, 0 to 1.", lambda info: info.usage),
    _Value(
        "kvpool_prefix_cache_recent_hit_ratio",
        "Tokens found for each asked for over the last 1,000 look-ups, 0 to 1.",
        lambda info: info.recent_hit_rate,
    ),
    _Value(
        "kvpool_quarantined_blocks",
        "Blocks that ended sessions held, not yet free since a step of theirs may still run. Counted as used.",
        lambda info: info.quarantined_blocks,
    ),
    _Value(
        "kvpool_quarantined_sessions",
        "Sessions that have ended, whose blocks are not yet free.",
        lambda info: info.quarantined_sessions,
    ),
    _Value("kvpool_sessions", "Open sessions: scheduler processes attached to the pool.", lambda info: info.sessions),
    _Value(
        "kvpool_prefix_cache_lookups_total",
        "Prefix look-ups, those of preempted requests apart.",
        lambda info: info.prefix_cache.requests,
    ),
    _Value(
        "kvpool_prefix_cache_queried_tokens_total",
        "Tokens that look-ups asked for, those of preempted requests apart.",
        lambda info: info.prefix_cache.queries_tokens,
    ),
    _Value(
        "kvpool_prefix_cache_hit_tokens_total",
        "Tokens that look-ups found, those of preempted requests apart.",
        lambda info: info.prefix_cache.hits_tokens,
    ),
    _Value(
        "kvpool_prefix_cache_preempted_lookups_total",
        "Prefix look-ups of requests that had been preempted.",
        lambda info: info.prefix_cache.preempted_requests,
    ),
    _Value(
        "kvpool_prefix_cache_preempted_queried_tokens_total",
        "Tokens that look-ups of preempted requests asked for.",
        lambda info: info.prefix_cache.preempted_queries_tokens,
    ),
    _Value(
        "kvpool_prefix_cache_preempted_hit_tokens_total",
        "Tokens that look-ups of preempted requests found.",
        lambda info: info.prefix_cache.preempted_hits_tokens,
    ),
    _Value(
        "kvpool_prefix_cache_shared_hit_tokens_total",
        "Of all tokens found, those in blocks that another session had filled.",
        lambda info: info.prefix_cache.shared_hits_tokens,
    ),
    _Value(
        "kvpool_prefix_cache_resets_total",
        "Times that the whole prefix cache was dropped.",
        lambda info: info.prefix_cache.resets,
    ),
    _Value("kvpool_allocations_total", "Times that a request was given room.", lambda info: info.activity.allocations),
    _Value(
        "kvpool_allocation_refusals_total",
        "Times that a request was given no room, as too few blocks were free.",
        lambda info: info.activity.refusals,
    ),
    _Value(
        "kvpool_evicted_blocks_total",
        "Cached blocks whose contents were given up to make room.",
        lambda info: info.evicted_blocks,
    ),
    _Value(
        "kvpool_preemptions_total", "Times that a running request's blocks were taken back.", lambda i: i.preemptions
    ),
    _Value("kvpool_sessions_opened_total", "Sessions opened.", lambda info: info.activity.sessions_opened),
    _Value(
        "kvpool_pool_suspensions_total",
        "Times that a missing rank stopped all allocation.",
        lambda info: info.activity.suspensions,
    ),
    _Value(
        "kvpool_steps_total", "Changes applied: steps of streams and unary calls.", lambda info: info.activity.steps
    ),
    _Value(
        "kvpool_step_retries_total",
        "Changes that came again and were answered from memory, applied once.",
        lambda info: info.activity.retries,
    ),
    _Value(
        "kvpool_block_event_batches_total",
        "Batches of block events made: one for each change that stored or removed cached blocks.",
        lambda info: info.event_sequence,
    ),
)

_GROUP_VALUES: Final[tuple[tuple[str, str, Callable[[GroupInfo], int]], ...]] = (
    (
        "kvpool_group_used_blocks",
        "Blocks of the group that requests hold or that are set aside for sinks.",
        lambda group: group.used_blocks,
    ),
    (
        "kvpool_group_cached_blocks",
        "Blocks of the group that can be found again by their hash.",
        lambda group: group.cached_blocks,
    ),
    (
        "kvpool_group_allocated_blocks_total",
        "Blocks that the group took from the free list.",
        lambda group: group.allocated_blocks,
    ),
    (
        "kvpool_group_evicted_blocks_total",
        "Cached blocks of the group whose contents were given up to make room.",
        lambda group: group.evicted_blocks,
    ),
)

_PUBLISHER_VALUES: Final[tuple[tuple[str, str, Callable[[PublisherCounts], int]], ...]] = (
    (
        "kvpool_event_messages_total",
        "Messages of block events published over ZeroMQ, heartbeats included.",
        lambda counts: counts.messages,
    ),
    (
        "kvpool_event_batches_skipped_total",
        "Batches of block events that were not published in time; subscribers were told all anew.",
        lambda counts: counts.skipped_batches,
    ),
    (
        "kvpool_event_replays_total",
        "Replays that subscribers asked for.",
        lambda counts: counts.replays,
    ),
    (
        "kvpool_event_snapshots_total",
        "Snapshots that subscribers asked for.",
        lambda counts: counts.snapshots,
    ),
)

_SESSION_ENDS: Final[dict[str, Callable[[PoolInfo], int]]] = {
    "closed": lambda info: info.activity.sessions_closed,
    "lease_expired": lambda info: info.activity.leases_expired,
    "epoch_passed": lambda info: info.activity.epoch_ends,
    "evicted": lambda info: info.activity.evicted_sessions,
}

HISTOGRAMS: Final[tuple[tuple[str, str, Sequence[float], Callable[[Measures], Histogram | None]], ...]] = (
    (
        "kvpool_block_lifetime_seconds",
        "From a block being taken to the eviction of its contents; a sample of the blocks.",
        BOUNDS_SECONDS,
        lambda measures: measures.lifetime,
    ),
    (
        "kvpool_block_idle_before_evict_seconds",
        "From the last access of a block to the eviction of its contents; a sample of the blocks.",
        BOUNDS_SECONDS,
        lambda measures: measures.idle,
    ),
    (
        "kvpool_block_reuse_gap_seconds",
        "Between two accesses of a cached block; a sample of the blocks.",
        BOUNDS_SECONDS,
        lambda measures: measures.reuse_gap,
    ),
    (
        "kvpool_step_seconds",
        "Server time of a step of a stream: decode, decide, encode.",
        STEP_BOUNDS_SECONDS,
        lambda measures: measures.step_seconds,
    ),
    (
        "kvpool_step_operations",
        "Operations of a step of a stream.",
        OPERATION_BOUNDS,
        lambda measures: measures.step_operations,
    ),
)


def pool_metrics(pools: Sequence[PoolSample]) -> Iterator[Metric]:
    """Makes the families of all pools, each with all pools' samples."""
    for value in _VALUES:
        yield family(value.name, value.help, ("pool",), [((p.info.config.name,), value.read(p.info)) for p in pools])
    yield from _groups(pools)
    yield from _states(pools)
    for event_name, text, count in _PUBLISHER_VALUES:
        published = [((p.info.config.name,), count(p.published)) for p in pools if p.published]
        yield family(event_name, text, ("pool",), published)
    yield family(
        "kvpool_sessions_ended_total",
        "Sessions that ended, by what ended them.",
        ("pool", "reason"),
        [((p.info.config.name, reason), read(p.info)) for p in pools for reason, read in _SESSION_ENDS.items()],
    )
    for name, text, bounds, read in HISTOGRAMS:
        samples = [((p.info.config.name,), read(p.measures) or Histogram(bounds)) for p in pools]
        yield histogram_family(name, text, ("pool",), samples)


def _groups(pools: Sequence[PoolSample]) -> Iterator[Metric]:
    for name, text, read in _GROUP_VALUES:
        yield family(
            name,
            text,
            ("pool", "group", "kind"),
            [
                ((p.info.config.name, str(i), group.kind), read(group))
                for p in pools
                for i, group in enumerate(p.info.groups)
            ],
        )


def _states(pools: Sequence[PoolSample]) -> Iterator[Metric]:
    yield family(
        "kvpool_pool_state",
        "1 for the state that the pool is in, 0 for the others.",
        ("pool", "state"),
        [((p.info.config.name, state.value), int(p.info.state is state)) for p in pools for state in PoolState],
    )
    yield family(
        "kvpool_ranks",
        "Ranks of the pool, by how they are; none if a scheduler holds the tensors itself.",
        ("pool", "state"),
        [
            ((p.info.config.name, state.value), [rank.state for rank in p.info.ranks].count(state))
            for p in pools
            for state in RankState
        ],
    )
    requests: list[tuple[tuple[str, ...], float]] = []
    for p in pools:
        requests.append(((p.info.config.name, "running"), p.info.running_requests))
        requests.append(((p.info.config.name, "waiting"), p.info.requests - p.info.running_requests))
    text = "Requests of all sessions: running ones hold blocks, waiting ones do not."
    yield family("kvpool_requests", text, ("pool", "state"), requests)


def family(
    name: str, text: str, labels: tuple[str, ...], samples: Sequence[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily | CounterMetricFamily:
    """Makes a counter of a name that ends in _total, a gauge of any other."""
    made: GaugeMetricFamily | CounterMetricFamily
    if name.endswith("_total"):
        made = CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
    else:
        made = GaugeMetricFamily(name, text, labels=labels)
    for values, sample in samples:
        made.add_metric(values, sample)
    return made


def histogram_family(
    name: str, text: str, labels: tuple[str, ...], samples: Sequence[tuple[tuple[str, ...], Histogram]]
) -> HistogramMetricFamily:
    """Makes a histogram of cumulative buckets."""
    made = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in samples:
        buckets, below = [], 0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            below += count
            buckets.append((_bound(bound), below))
        made.add_metric(values, buckets, histogram.total)
    return made


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(float(bound))
