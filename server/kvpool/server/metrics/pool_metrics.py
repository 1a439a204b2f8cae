"""Prometheus metrics of pools, with their names, units and help texts; docs/reference/metrics.md lists them.

The number of label values is bounded: pools by `--max-pools`, groups by their pool, all others by lists in the code.
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
    """Histograms of a pool; None where nothing was measured yet.

    Attributes:
        lifetime: Seconds from a block's allocation to its eviction.
        idle: Seconds from a block's last access to its eviction.
        reuse_gap: Seconds between two accesses of a block.
        step_seconds: Server time per step, in seconds.
        step_operations: Operations per step.
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
        info: The state of the pool.
        measures: Its histograms.
        published: Counts of its publisher; None if its events are not published over ZeroMQ.
    """

    info: PoolInfo
    measures: Measures
    published: PublisherCounts | None = None


@dataclass(frozen=True, slots=True)
class _Value:
    """A metric with one sample per pool: a counter if its name ends in _total, else a gauge."""

    name: str
    help: str
    read: Callable[[PoolInfo], float]


def _usable(info: PoolInfo) -> int:
    return max(info.config.num_blocks - 1, 0)


_VALUES: Final = (
    _Value(
        "kvpool_pool_epoch",
        "Epoch of the pool; it increases whenever the contents of all blocks are lost.",
        lambda info: info.epoch,
    ),
    _Value("kvpool_pool_blocks", "Usable blocks, without the null block: free + used.", _usable),
    _Value(
        "kvpool_pool_free_blocks", "Blocks that can be allocated now, including cached ones.", lambda i: i.free_blocks
    ),
    _Value(
        "kvpool_pool_used_blocks",
        "Blocks held by requests or reserved for attention sinks.",
        lambda info: _usable(info) - info.free_blocks,
    ),
    _Value(
        "kvpool_pool_cached_blocks",
        "Blocks, used or free, that prefix look-ups can find.",
        lambda info: info.cached_blocks,
    ),
    _Value("kvpool_pool_usage_ratio", "Share of usable blocks that are used, 0 to 1.", lambda info: info.usage),
    _Value(
        "kvpool_prefix_cache_recent_hit_ratio",
        "Prefix cache hit rate in tokens over the last 1,000 look-ups, 0 to 1.",
        lambda info: info.recent_hit_rate,
    ),
    _Value(
        "kvpool_quarantined_blocks",
        "Blocks of ended sessions that are not free yet because a step may still run; counted as used.",
        lambda info: info.quarantined_blocks,
    ),
    _Value(
        "kvpool_quarantined_sessions",
        "Ended sessions whose blocks are in quarantine.",
        lambda info: info.quarantined_sessions,
    ),
    _Value("kvpool_sessions", "Open sessions: scheduler processes attached to the pool.", lambda info: info.sessions),
    _Value(
        "kvpool_prefix_cache_lookups_total",
        "Prefix look-ups, without those of preempted requests.",
        lambda info: info.prefix_cache.requests,
    ),
    _Value(
        "kvpool_prefix_cache_queried_tokens_total",
        "Tokens queried by look-ups, without those of preempted requests.",
        lambda info: info.prefix_cache.queries_tokens,
    ),
    _Value(
        "kvpool_prefix_cache_hit_tokens_total",
        "Tokens found by look-ups, without those of preempted requests.",
        lambda info: info.prefix_cache.hits_tokens,
    ),
    _Value(
        "kvpool_prefix_cache_preempted_lookups_total",
        "Prefix look-ups of preempted requests.",
        lambda info: info.prefix_cache.preempted_requests,
    ),
    _Value(
        "kvpool_prefix_cache_preempted_queried_tokens_total",
        "Tokens queried by look-ups of preempted requests.",
        lambda info: info.prefix_cache.preempted_queries_tokens,
    ),
    _Value(
        "kvpool_prefix_cache_preempted_hit_tokens_total",
        "Tokens found by look-ups of preempted requests.",
        lambda info: info.prefix_cache.preempted_hits_tokens,
    ),
    _Value(
        "kvpool_prefix_cache_shared_hit_tokens_total",
        "Tokens found in blocks that another session computed; part of all tokens found.",
        lambda info: info.prefix_cache.shared_hits_tokens,
    ),
    _Value(
        "kvpool_prefix_cache_resets_total",
        "Resets of the whole prefix cache.",
        lambda info: info.prefix_cache.resets,
    ),
    _Value(
        "kvpool_allocations_total",
        "Successful allocations for a request, including those that clients granted themselves and reported later.",
        lambda info: info.activity.allocations,
    ),
    _Value(
        "kvpool_allocation_refusals_total",
        "Allocations refused because too few blocks were free.",
        lambda info: info.activity.refusals,
    ),
    _Value(
        "kvpool_evicted_blocks_total",
        "Cached blocks evicted to make room.",
        lambda info: info.evicted_blocks,
    ),
    _Value("kvpool_preemptions_total", "Preemptions of running requests.", lambda i: i.preemptions),
    _Value("kvpool_sessions_opened_total", "Sessions opened.", lambda info: info.activity.sessions_opened),
    _Value(
        "kvpool_pool_suspensions_total",
        "Suspensions of all allocation because a rank was missing.",
        lambda info: info.activity.suspensions,
    ),
    _Value(
        "kvpool_steps_total", "Changes applied: steps of streams and unary calls.", lambda info: info.activity.steps
    ),
    _Value(
        "kvpool_step_retries_total",
        "Repeated changes that were answered from memory and not applied again.",
        lambda info: info.activity.retries,
    ),
    _Value(
        "kvpool_block_event_batches_total",
        "Batches of block events: one per change that stored or removed cached blocks.",
        lambda info: info.event_sequence,
    ),
)

_GROUP_VALUES: Final[tuple[tuple[str, str, Callable[[GroupInfo], int]], ...]] = (
    (
        "kvpool_group_used_blocks",
        "Blocks of the group held by requests, shared ones counted once, or reserved for attention sinks.",
        lambda group: group.used_blocks,
    ),
    (
        "kvpool_group_cached_blocks",
        "Blocks of the group that prefix look-ups can find.",
        lambda group: group.cached_blocks,
    ),
    (
        "kvpool_group_allocated_blocks_total",
        "Blocks that the group took from the free list.",
        lambda group: group.allocated_blocks,
    ),
    (
        "kvpool_group_evicted_blocks_total",
        "Cached blocks of the group evicted to make room.",
        lambda group: group.evicted_blocks,
    ),
)

_PUBLISHER_VALUES: Final[tuple[tuple[str, str, Callable[[PublisherCounts], int]], ...]] = (
    (
        "kvpool_event_messages_total",
        "Messages published over ZeroMQ, including heartbeats.",
        lambda counts: counts.messages,
    ),
    (
        "kvpool_event_batches_skipped_total",
        "Batches of block events not published in time; all cached blocks were published again instead.",
        lambda counts: counts.skipped_batches,
    ),
    (
        "kvpool_event_replays_total",
        "Replays requested by subscribers.",
        lambda counts: counts.replays,
    ),
    (
        "kvpool_event_snapshots_total",
        "Snapshots requested by subscribers.",
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
        "Time from a block's allocation to its eviction, for sampled blocks.",
        BOUNDS_SECONDS,
        lambda measures: measures.lifetime,
    ),
    (
        "kvpool_block_idle_before_evict_seconds",
        "Time from a block's last access (hit or allocation) to its eviction, for sampled blocks.",
        BOUNDS_SECONDS,
        lambda measures: measures.idle,
    ),
    (
        "kvpool_block_reuse_gap_seconds",
        "Time between two accesses of a cached block, for sampled blocks.",
        BOUNDS_SECONDS,
        lambda measures: measures.reuse_gap,
    ),
    (
        "kvpool_step_seconds",
        "Server time per step of a stream: decode, apply, encode.",
        STEP_BOUNDS_SECONDS,
        lambda measures: measures.step_seconds,
    ),
    (
        "kvpool_step_operations",
        "Operations per step of a stream.",
        OPERATION_BOUNDS,
        lambda measures: measures.step_operations,
    ),
)


def pool_metrics(pools: Sequence[PoolSample]) -> Iterator[Metric]:
    """Makes the metric families, each with the samples of all pools."""
    for value in _VALUES:
        yield family(value.name, value.help, ("pool",), [((p.info.config.name,), value.read(p.info)) for p in pools])
    yield from _groups(pools)
    yield from _states(pools)
    for event_name, text, count in _PUBLISHER_VALUES:
        published = [((p.info.config.name,), count(p.published)) for p in pools if p.published]
        yield family(event_name, text, ("pool",), published)
    yield family(
        "kvpool_sessions_ended_total",
        "Ended sessions by reason.",
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
        "1 for the current state of the pool, 0 for the others.",
        ("pool", "state"),
        [((p.info.config.name, state.value), int(p.info.state is state)) for p in pools for state in PoolState],
    )
    yield family(
        "kvpool_ranks",
        "Ranks of the pool by state; none if the scheduler owns the tensors.",
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
    text = "Requests of all sessions; running ones hold blocks, waiting ones do not."
    yield family("kvpool_requests", text, ("pool", "state"), requests)


def family(
    name: str, text: str, labels: tuple[str, ...], samples: Sequence[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily | CounterMetricFamily:
    """Makes a counter if the name ends in _total, else a gauge."""
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
    """Makes a histogram with cumulative buckets."""
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
