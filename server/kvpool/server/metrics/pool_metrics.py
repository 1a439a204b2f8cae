"""Prometheus metrics of pools, with their names, units and help texts; the built site lists them.

The number of label values is bounded: pools by `--max-pools`, groups by their pool, all others by lists in the code.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import Metric

from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.statistics import Histogram
from kvpool.server.metrics.observations import StepHistograms
from kvpool.v1.pool_pb2 import GroupInfo, MissCount, MissReason, PoolInfo, PoolState, RankState
from kvpool.wire.metric_families import Row, families, family, histogram_family
from kvpool.wire.readable import words

_POOL_STATES: Final = words(PoolState)
_RANK_STATES: Final = words(RankState)
_MISS_REASONS: Final = words(MissReason)


@dataclass(frozen=True, slots=True)
class PoolSample:
    """A pool at the moment of a scrape.

    Attributes:
        info: The state of the pool.
        histograms: Copies of its histograms, by metric; see `copy_histograms`.
        changed_tokens: See `HitCurve`; empty if there is no estimate for such a pool.
    """

    info: PoolInfo
    histograms: dict[str, Histogram]
    changed_tokens: dict[float, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _LabelledRow:
    """A metric with one sample per pool and value of a second label.

    Attributes:
        label: The second label.
        text: The help text.
        read: Returns the samples of a pool, by value of the second label.
    """

    label: str
    text: str
    read: Callable[[PoolInfo], dict[str, float]]


def _usable(info: PoolInfo) -> int:
    return max(info.config.num_blocks - 1, 0)


_POOL: Final[dict[str, Row[PoolInfo]]] = {
    "kvpool_pool_epoch": Row("Epoch of the pool; it increases whenever the contents of all blocks are lost.", "epoch"),
    "kvpool_pool_blocks": Row("Usable blocks, without the null block: free + used.", _usable),
    "kvpool_pool_free_blocks": Row("Blocks that can be allocated now, including cached ones.", "free_blocks"),
    "kvpool_pool_used_blocks": Row(
        "Blocks held by requests or reserved for attention sinks.", lambda pool: _usable(pool) - pool.free_blocks
    ),
    "kvpool_pool_cached_blocks": Row("Blocks, used or free, that prefix look-ups can find.", "cached_blocks"),
    "kvpool_pool_usage_ratio": Row("Share of usable blocks that are used, 0 to 1.", "usage"),
    "kvpool_prefix_cache_recent_hit_ratio": Row(
        "Prefix cache hit rate in tokens over the last 1,000 look-ups, 0 to 1.", "recent_hit_rate"
    ),
    "kvpool_quarantined_blocks": Row(
        "Blocks of ended sessions that are not free yet because a step may still run; counted as used.",
        "quarantined_blocks",
    ),
    "kvpool_quarantined_sessions": Row("Ended sessions whose blocks are in quarantine.", "quarantined_sessions"),
    "kvpool_sessions": Row("Open sessions: scheduler processes attached to the pool.", "sessions"),
    "kvpool_prefix_cache_lookups_total": Row(
        "Prefix look-ups of requests that got slots, each once, without those of preempted requests.",
        "prefix_cache.requests",
    ),
    "kvpool_prefix_cache_queried_tokens_total": Row(
        "Tokens queried by look-ups, without those of preempted requests.", "prefix_cache.queries_tokens"
    ),
    "kvpool_prefix_cache_hit_tokens_total": Row(
        "Tokens found by look-ups, without those of preempted requests.", "prefix_cache.hits_tokens"
    ),
    "kvpool_prefix_cache_preempted_lookups_total": Row(
        "Prefix look-ups of preempted requests.", "prefix_cache.preempted_requests"
    ),
    "kvpool_prefix_cache_preempted_queried_tokens_total": Row(
        "Tokens queried by look-ups of preempted requests.", "prefix_cache.preempted_queries_tokens"
    ),
    "kvpool_prefix_cache_preempted_hit_tokens_total": Row(
        "Tokens found by look-ups of preempted requests.", "prefix_cache.preempted_hits_tokens"
    ),
    "kvpool_prefix_cache_shared_hit_tokens_total": Row(
        "Tokens found in blocks that another session computed; part of all tokens found.",
        "prefix_cache.shared_hits_tokens",
    ),
    "kvpool_prefix_cache_resets_total": Row("Resets of the whole prefix cache.", "prefix_cache.resets"),
    "kvpool_allocations_total": Row(
        "Successful allocations for a request, including those that clients granted themselves and reported later.",
        "activity.allocations",
    ),
    "kvpool_allocation_refusals_total": Row(
        "Allocations refused because too few blocks were free.", "activity.refusals"
    ),
    "kvpool_evicted_blocks_total": Row("Cached blocks evicted by allocations.", "evicted_blocks"),
    "kvpool_preemptions_total": Row("Preemptions of running requests.", "preemptions"),
    "kvpool_sessions_opened_total": Row("Sessions opened.", "activity.sessions_opened"),
    "kvpool_pool_suspensions_total": Row(
        "Suspensions of all allocation because a rank was missing.", "activity.suspensions"
    ),
    "kvpool_steps_total": Row("Changes applied: steps of streams and unary calls.", "activity.steps"),
    "kvpool_step_retries_total": Row(
        "Repeated changes that were answered from memory and not applied again.", "activity.retries"
    ),
    "kvpool_block_event_batches_total": Row(
        "Batches of block events: one per change that stored or removed cached blocks.", "event_sequence"
    ),
}

_HOST: Final[dict[str, Row[PoolInfo]]] = {
    "kvpool_prefix_cache_host_hit_tokens_total": Row(
        "Tokens found in host memory, those of preempted requests included; part of all tokens found.",
        "prefix_cache.host_hits_tokens",
    ),
    "kvpool_host_blocks": Row("Blocks of host memory, the second tier.", "config.num_host_blocks"),
    "kvpool_host_cached_blocks": Row(
        "Blocks of host memory that prefix look-ups can find, also those whose contents the first tier has.",
        "host_memory.cached_blocks",
    ),
    "kvpool_host_used_blocks": Row(
        "Blocks of host memory that copies may be reading or writing.", "host_memory.used_blocks"
    ),
    "kvpool_host_copied_out_blocks_total": Row("Blocks copied to host memory.", "host_memory.copied_out_blocks"),
    "kvpool_host_copied_in_blocks_total": Row(
        "Blocks copied from host memory, for hits.", "host_memory.copied_in_blocks"
    ),
    "kvpool_host_copying_out_seconds_total": Row(
        "Time that copies to host memory took on the first rank of engines.",
        lambda pool: pool.host_memory.copying_out_microseconds / 1e6,
    ),
    "kvpool_host_copying_in_seconds_total": Row(
        "Time that copies from host memory took on the first rank of engines.",
        lambda pool: pool.host_memory.copying_in_microseconds / 1e6,
    ),
    "kvpool_host_evicted_blocks_total": Row(
        "Cached blocks of host memory that others replaced.", "host_memory.evicted_blocks"
    ),
    "kvpool_host_lost_blocks_total": Row(
        "Cached blocks of the first tier that allocations evicted before they were copied to host memory.",
        "host_memory.lost_blocks",
    ),
}
"""Only of pools with host memory."""

_LABELLED: Final = {
    "kvpool_pool_state": _LabelledRow(
        "state",
        "1 for the current state of the pool, 0 for the others.",
        lambda pool: {word: pool.state == state for state, word in _POOL_STATES.items()},
    ),
    "kvpool_ranks": _LabelledRow(
        "state",
        "Ranks of the pool by state; none if the scheduler owns the tensors.",
        lambda pool: {word: [rank.state for rank in pool.ranks].count(state) for state, word in _RANK_STATES.items()},
    ),
    "kvpool_requests": _LabelledRow(
        "state",
        "Requests of all sessions; running ones hold blocks, waiting ones do not.",
        lambda pool: {"running": pool.running_requests, "waiting": pool.requests - pool.running_requests},
    ),
    "kvpool_sessions_ended_total": _LabelledRow(
        "reason",
        "Ended sessions by reason.",
        lambda pool: {
            "closed": pool.activity.sessions_closed,
            "lease_expired": pool.activity.leases_expired,
            "epoch_passed": pool.activity.epoch_ends,
            "evicted": pool.activity.evicted_sessions,
            "process_gone": pool.activity.processes_gone,
        },
    ),
    "kvpool_client_waits_total": _LabelledRow(
        "cause",
        "Steps whose answers schedulers wait for, by cause.",
        lambda pool: {
            "admission": pool.activity.waits_admission,
            "prefill": pool.activity.waits_prefill,
            "decode": pool.activity.waits_decode,
            "exact": pool.activity.waits_exact,
        },
    ),
}

_GROUP: Final[dict[str, Row[GroupInfo]]] = {
    "kvpool_group_used_blocks": Row(
        "Blocks of the group held by requests, shared ones counted once, or reserved for attention sinks.",
        "used_blocks",
    ),
    "kvpool_group_cached_blocks": Row("Blocks of the group that prefix look-ups can find.", "cached_blocks"),
    "kvpool_group_allocated_blocks_total": Row("Blocks that the group took from the free list.", "allocated_blocks"),
    "kvpool_group_evicted_blocks_total": Row("Cached blocks of the group evicted by allocations.", "evicted_blocks"),
}

_MISSES: Final[dict[str, Row[MissCount]]] = {
    "kvpool_prefix_cache_misses_total": Row(
        "Counted look-ups that the group ended early, by reason, with those of preempted requests.", "lookups"
    ),
    "kvpool_prefix_cache_missed_tokens_total": Row(
        "Tokens between the hits of these look-ups and the longest hits that their requests could have.", "tokens"
    ),
}

_GAINED: Final = (
    "Further tokens that look-ups would have found in a pool of `size` times the blocks; estimated on a sample."
)
_LOST: Final = (
    "Tokens found that look-ups would have missed in a pool of `size` times the blocks; estimated on a sample."
)

BLOCK_HISTOGRAMS: Final = {
    "kvpool_block_lifetime_seconds": (
        "Time from a block's allocation to its eviction, for sampled blocks.",
        "lifetime",
    ),
    "kvpool_block_idle_before_evict_seconds": (
        "Time from a block's last access (hit or allocation) to its eviction, for sampled blocks.",
        "idle",
    ),
    "kvpool_block_reuse_gap_seconds": ("Time between two accesses of a cached block, for sampled blocks.", "reuse_gap"),
}
"""By metric: help text, and name in `BlockLifetimes`."""
_STEP_HISTOGRAMS: Final = {
    "kvpool_step_seconds": ("Server time per step of a stream: decode, apply, encode.", "seconds"),
    "kvpool_step_operations": ("Operations per step of a stream.", "operations"),
}
"""By metric: help text, and name in `StepHistograms`."""

_NO_LIFETIMES: Final = BlockLifetimes(1, lambda _: 0)
_NO_STEPS: Final = StepHistograms()


def copy_histograms(lifetimes: BlockLifetimes | None, steps: StepHistograms | None) -> dict[str, Histogram]:
    """Copies the histograms of a pool, by metric; those of None are empty."""
    parts = (BLOCK_HISTOGRAMS, lifetimes or _NO_LIFETIMES), (_STEP_HISTOGRAMS, steps or _NO_STEPS)
    return {metric: getattr(part, name).copy() for table, part in parts for metric, (_, name) in table.items()}


def _all_misses(group: GroupInfo) -> Iterator[MissCount]:
    """Yields the misses of a group with all reasons, so that a counter does not begin with its first miss."""
    counted = {miss.reason: miss for miss in group.misses}
    for reason in _MISS_REASONS:
        yield counted.get(reason) or MissCount(reason=reason)


def pool_metrics(pools: Sequence[PoolSample]) -> Iterator[Metric]:
    """Makes the metric families, each with the samples of all pools."""
    infos = [((pool.info.config.name,), pool.info) for pool in pools]
    yield from families(_POOL, ("pool",), infos)
    yield from families(_HOST, ("pool",), [each for each in infos if each[1].HasField("host_memory")])
    groups = [((*name, str(i), group.kind), group) for name, info in infos for i, group in enumerate(info.groups)]
    yield from families(_GROUP, ("pool", "group", "kind"), groups)
    misses = [((*labels, _MISS_REASONS[miss.reason]), miss) for labels, group in groups for miss in _all_misses(group)]
    yield from families(_MISSES, ("pool", "group", "kind", "reason"), misses)
    for metric, row in _LABELLED.items():
        samples = [((*name, value), count) for name, info in infos for value, count in row.read(info).items()]
        yield family(metric, row.text, ("pool", row.label), samples)
    changes = [
        ((pool.info.config.name, f"{size:g}"), size, tokens)
        for pool in pools
        for size, tokens in pool.changed_tokens.items()
    ]
    larger = [(labels, tokens) for labels, size, tokens in changes if size > 1]
    smaller = [(labels, -tokens) for labels, size, tokens in changes if size < 1]
    yield family("kvpool_prefix_cache_gained_tokens_total", _GAINED, ("pool", "size"), larger)
    yield family("kvpool_prefix_cache_lost_tokens_total", _LOST, ("pool", "size"), smaller)
    for metric, (text, _) in (BLOCK_HISTOGRAMS | _STEP_HISTOGRAMS).items():
        histograms = [((pool.info.config.name,), pool.histograms[metric]) for pool in pools]
        yield histogram_family(metric, text, ("pool",), histograms)
