"""What Prometheus is told of a server: its pools, its calls, its version."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Final

from prometheus_client import Metric

from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.ids import PoolName
from kvpool.core.statistics import Histogram
from kvpool.core.views.pool_info import PoolInfo
from kvpool.server.metrics.observations import JournalCounts, Observations, PublisherCounts
from kvpool.server.metrics.pool_metrics import Measures, PoolSample, family, histogram_family, pool_metrics
from kvpool.server.metrics.vllm_metrics import vllm_metrics

_METHOD: Final = ("method",)


@dataclass(frozen=True, slots=True)
class PoolSource:
    """What there is to tell of a pool.

    Attributes:
        info: How it is.
        block_lifetimes: How long its blocks keep what they hold, if that is sampled.
        published: What its publisher did, if its events are published.
    """

    info: PoolInfo
    block_lifetimes: BlockLifetimes | None = None
    published: PublisherCounts | None = None


@dataclass(frozen=True, slots=True)
class _Counts:
    """Copies of counts of `Observations`, by its names."""

    rpcs: dict[tuple[str, str], int]
    refusals: dict[str, int]


def sampler(
    describe: Callable[[], list[PoolSource]],
    observations: Observations,
    *,
    with_vllm: bool,
    journal: JournalCounts | None = None,
) -> Callable[[], Callable[[], Iterable[Metric]]]:
    """Makes what copies a server's figures on its event loop, and returns what makes metrics of the copy.

    Args:
        describe: Tells of all pools.
        observations: What the services saw.
        with_vllm: Tell the same under vLLM's names, too.
        journal: What the server's journal counts; None if it has none.
    """
    release = version("kvpool")  # reads the installation's files: once, not a scrape

    def sample() -> Callable[[], Iterable[Metric]]:
        pools = [
            PoolSample(
                found.info, _measures(found.info.config.name, found.block_lifetimes, observations), found.published
            )
            for found in describe()
        ]
        observations.forget_pools_but({pool.info.config.name for pool in pools})
        timed = {method: histogram.copy() for method, histogram in observations.rpc_seconds.items()}
        counts = _Counts(dict(observations.rpcs), dict(observations.refusals))
        written = replace(journal) if journal else None
        return partial(_render, release, pools, counts, timed, written, with_vllm=with_vllm)

    return sample


def _measures(name: PoolName, kept: BlockLifetimes | None, observations: Observations) -> Measures:
    def copy(histogram: Histogram | None) -> Histogram | None:
        return histogram.copy() if histogram else None

    return Measures(
        copy(kept.lifetime if kept else None),
        copy(kept.idle if kept else None),
        copy(kept.reuse_gap if kept else None),
        copy(observations.step_seconds.get(name)),
        copy(observations.step_operations.get(name)),
    )


def _render(  # noqa: PLR0913 - all that there is to tell
    release: str,
    pools: list[PoolSample],
    counts: _Counts,
    timed: dict[str, Histogram],
    journal: JournalCounts | None,
    *,
    with_vllm: bool,
) -> Iterator[Metric]:
    yield family("kvpool_build_info", "Version of the server.", ("version",), [((release,), 1)])
    yield from pool_metrics(pools)
    yield family(
        "kvpool_rpcs_total", "Calls that ended, by gRPC's code.", ("method", "code"), list(counts.rpcs.items())
    )
    refused = [((reason,), count) for reason, count in counts.refusals.items()]
    yield family("kvpool_door_refusals_total", "Calls that were not let in.", ("reason",), refused)
    yield histogram_family(
        "kvpool_rpc_seconds",
        "Server time of unary calls.",
        _METHOD,
        [((method,), histogram) for method, histogram in timed.items()],
    )
    if journal:
        yield from _journal_metrics(journal)
    if with_vllm:
        yield from vllm_metrics(pools)


def _journal_metrics(journal: JournalCounts) -> Iterator[Metric]:
    for name, help_text, value in (
        ("kvpool_journal_up", "Whether a server killed now would come back as it is.", float(journal.is_up)),
        ("kvpool_journal_bytes", "What the journal's files take.", journal.size_bytes),
        ("kvpool_journal_records_total", "Changes written to the journal.", journal.records),
        ("kvpool_journal_snapshots_total", "Snapshots written whole.", journal.snapshots),
        ("kvpool_journal_failures_total", "Times that the journal was given up.", journal.failures),
        ("kvpool_journal_snapshot_seconds", "How long the newest snapshot took.", journal.snapshot_seconds),
        ("kvpool_journal_stopped_seconds", "Of it, for how long all else waited.", journal.stopped_seconds),
        ("kvpool_journal_recovery_seconds", "How long the server read its journal.", journal.recovery_seconds),
    ):
        yield family(name, help_text, (), [((), value)])
