"""Prometheus metrics of a server: its pools, calls, journal and version."""

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
    """Sources of a pool's metrics.

    Attributes:
        info: The state of the pool.
        block_lifetimes: Sampled lifetimes of its blocks, if enabled.
        published: Counts of its publisher, if its events are published.
    """

    info: PoolInfo
    block_lifetimes: BlockLifetimes | None = None
    published: PublisherCounts | None = None


@dataclass(frozen=True, slots=True)
class _Counts:
    """Copies of counts of `Observations`, under the same names."""

    rpcs: dict[tuple[str, str], int]
    refusals: dict[str, int]


def sampler(
    describe: Callable[[], list[PoolSource]],
    observations: Observations,
    *,
    with_vllm: bool,
    journal: JournalCounts | None = None,
) -> Callable[[], Callable[[], Iterable[Metric]]]:
    """Makes a function that copies a server's figures. That function returns one that makes metrics of the copy.

    The first function runs on the server's event loop, the second one in any thread.

    Args:
        describe: Returns the sources of all pools.
        observations: Figures counted by the services.
        with_vllm: Whether to export the figures under vLLM's names, too.
        journal: Counts of the journal; None without a journal.
    """
    release = version("kvpool")  # reads files, so call it once and not per scrape

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


def _render(  # noqa: PLR0913 - one argument per source
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
        "kvpool_rpcs_total", "Completed calls by gRPC status code.", ("method", "code"), list(counts.rpcs.items())
    )
    refused = [((reason,), count) for reason, count in counts.refusals.items()]
    yield family(
        "kvpool_door_refusals_total", "Calls that failed authentication or authorization.", ("reason",), refused
    )
    yield histogram_family(
        "kvpool_rpc_seconds",
        "Server time per authenticated unary call, from the arrival of its request.",
        _METHOD,
        [((method,), histogram) for method, histogram in timed.items()],
    )
    if journal:
        yield from _journal_metrics(journal)
    if with_vllm:
        yield from vllm_metrics(pools)


def _journal_metrics(journal: JournalCounts) -> Iterator[Metric]:
    for name, help_text, value in (
        ("kvpool_journal_up", "1 if a server killed now would recover its state.", float(journal.is_up)),
        ("kvpool_journal_bytes", "Size of the journal's files.", journal.size_bytes),
        ("kvpool_journal_records_total", "Changes written to the journal.", journal.records),
        ("kvpool_journal_snapshots_total", "Snapshots completed.", journal.snapshots),
        (
            "kvpool_journal_failures_total",
            "Number of times that the journal was given up, for example on a full disk.",
            journal.failures,
        ),
        ("kvpool_journal_snapshot_seconds", "Duration of the newest snapshot.", journal.snapshot_seconds),
        (
            "kvpool_journal_stopped_seconds",
            "Part of the newest snapshot's duration in which the server did nothing else.",
            journal.stopped_seconds,
        ),
        (
            "kvpool_journal_recovery_seconds",
            "Time to read the journal when the server started.",
            journal.recovery_seconds,
        ),
    ):
        yield family(name, help_text, (), [((), value)])
