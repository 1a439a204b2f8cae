"""Prometheus metrics of a server: its pools, calls, credentials, limits, journal and version.

1. Only the event loop reads the core, so a scrape shows all pools at the same moment. It copies the figures of pools
   and calls, and a thread makes the metrics. Those of everything else are few: the loop makes them.
2. Figures are computed per scrape only. The core counts plain ints: the locks and label look-ups of Prometheus' objects
   would cost more than the work that they count.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from typing import Final, Protocol, TypeVar

from prometheus_client import Metric
from prometheus_client.registry import Collector

from kvpool.server.metrics.observations import JournalCounts, Observations
from kvpool.server.metrics.pool_metrics import PoolSample, pool_metrics
from kvpool.server.metrics.vllm_metrics import vllm_metrics
from kvpool.wire.metric_families import Row, families, family, histogram_family

SCRAPE_SECONDS: Final = 5.0
"""Maximum time that a scrape waits for the event loop."""

_ResultT = TypeVar("_ResultT")

_JOURNAL: Final[dict[str, Row[JournalCounts]]] = {
    "kvpool_journal_up": Row("1 if a server killed now would recover its state.", "is_up"),
    "kvpool_journal_bytes": Row("Size of the journal's files.", "size_bytes"),
    "kvpool_journal_records_total": Row("Changes written to the journal.", "records"),
    "kvpool_journal_snapshots_total": Row("Snapshots completed.", "snapshots"),
    "kvpool_journal_failures_total": Row(
        "Number of times that the journal was given up, for example on a full disk.", "failures"
    ),
    "kvpool_journal_snapshot_seconds": Row("Duration of the newest snapshot.", "snapshot_seconds"),
    "kvpool_journal_stopped_seconds": Row(
        "Part of the newest snapshot's duration in which the server did nothing else.", "stopped_seconds"
    ),
    "kvpool_journal_recovery_seconds": Row("Time to read the journal when the server started.", "recovery_seconds"),
}


def on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], _ResultT]) -> _ResultT:
    """Calls a function on an event loop; called in another thread.

    Raises:
        TimeoutError: The loop is busy for `SCRAPE_SECONDS`.
    """

    async def call() -> _ResultT:
        return function()

    waiting = asyncio.run_coroutine_threadsafe(call(), loop)
    try:
        return waiting.result(SCRAPE_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"the event loop was busy for {SCRAPE_SECONDS:g} s") from None


async def awaited_from(
    loop: asyncio.AbstractEventLoop, function: Callable[[], Coroutine[object, object, _ResultT]]
) -> _ResultT:
    """Runs a coroutine on an event loop; called on that of another thread.

    Raises:
        TimeoutError: The loop is busy for `SCRAPE_SECONDS`.
    """
    waiting = asyncio.run_coroutine_threadsafe(function(), loop)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(waiting), SCRAPE_SECONDS)
    except TimeoutError:
        raise TimeoutError(f"the event loop was busy for {SCRAPE_SECONDS:g} s") from None


class LoopCollector(Collector):
    """Collects from state that belongs to an event loop.

    Args:
        loop: The loop.
        sample: Copies the figures; called on the loop. It returns a function that makes the metrics in a thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sample: Callable[[], Callable[[], Iterable[Metric]]]) -> None:
        self._loop = loop
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        """Yields all current metrics.

        Raises:
            TimeoutError: The loop is busy for too long, and the scrape fails.
        """
        yield from on_loop(self._loop, self._sample)()

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, because the loop itself registers this collector and cannot wait for itself."""
        return ()


class Credentials(Protocol):
    """Credentials that are read from files."""

    @property
    def age_seconds(self) -> float:
        """Time since the files were last found to contain the credentials in force."""

    @property
    def expires_seconds(self) -> float | None:
        """When the first of them expires, in seconds since 1970; None if none of them does."""


def sampler(
    sample_pools: Callable[[], list[PoolSample]],
    observations: Observations,
    others: Callable[[Sequence[PoolSample]], Iterable[Metric]],
    *,
    with_vllm: bool,
) -> Callable[[], Callable[[], Iterable[Metric]]]:
    """Makes a function that copies a server's figures. That function returns one that makes metrics of the copy.

    The first function runs on the server's event loop, the second one in any thread.

    Args:
        sample_pools: Copies the figures of all pools.
        observations: Figures counted by the services.
        others: Makes the other metrics, which are few, given the figures of all pools; called on the loop.
        with_vllm: Whether to export the figures under vLLM's names, too.
    """

    def sample() -> Callable[[], Iterable[Metric]]:
        pools = sample_pools()
        observations.forget_pools_but({pool.info.config.name for pool in pools})
        return partial(_render, pools, observations.copy(), list(others(pools)), with_vllm=with_vllm)

    return sample


def _render(pools: list[PoolSample], seen: Observations, others: list[Metric], *, with_vllm: bool) -> Iterator[Metric]:
    yield from pool_metrics(pools)
    yield family(
        "kvpool_rpcs_total", "Completed calls by gRPC status code.", ("method", "code"), list(seen.rpcs.items())
    )
    for name, text, refusals in (
        ("kvpool_door_refusals_total", "Calls that failed authentication or authorization.", seen.refusals),
        ("kvpool_limit_refusals_total", "Calls that exceeded a limit.", seen.limit_refusals),
    ):
        yield family(name, text, ("reason",), [((reason,), count) for reason, count in refusals.items()])
    yield histogram_family(
        "kvpool_rpc_seconds",
        "Server time per authenticated unary call, from the arrival of its request.",
        ("method",),
        [((method,), histogram) for method, histogram in seen.rpc_seconds.items()],
    )
    yield from others
    if with_vllm:
        yield from vllm_metrics(pools)


def server_metrics(
    credentials: Mapping[str, Credentials], limit_usage: Mapping[str, float], journal: JournalCounts | None
) -> Iterator[Metric]:
    """Makes the metrics that belong to no pool and no call.

    Args:
        credentials: The credentials of the server, by kind.
        limit_usage: The share of each limit that is in use.
        journal: Counts of the journal; None without a journal.
    """
    yield family("kvpool_build_info", "Version of the server.", ("version",), [((_release(),), 1)])
    yield family(
        "kvpool_limit_usage_ratio",
        "Share of a limit that is in use, 0 to 1.",
        ("limit",),
        [((limit,), share) for limit, share in limit_usage.items()],
    )
    yield family(
        "kvpool_credentials_age_seconds",
        "Time since the files were last found to contain the credentials in force. It grows while a change is refused.",
        ("kind",),
        [((kind,), each.age_seconds) for kind, each in credentials.items()],
    )
    yield family(
        "kvpool_credentials_expire_timestamp_seconds",
        "When the first of the valid credentials expires, in seconds since 1970.",
        ("kind",),
        [((kind,), expires) for kind, each in credentials.items() if (expires := each.expires_seconds) is not None],
    )
    if journal:
        yield from families(_JOURNAL, (), [((), journal)])


@cache
def _release() -> str:
    return version("kvpool")  # reads files
