"""Makes the metrics of a server and of a rank without running one, and reads them as Prometheus does."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import grpc
from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.ids import PoolName
from kvpool.core.ranks.messages import PoolState, RankGroupOptions
from kvpool.gpu_worker.rank_protocol import Phase
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import DeviceMemory, WorkerStatus, WorkerUsage
from kvpool.gpu_worker.worker_metrics import WorkerCollector
from kvpool.server.cluster.shard_metrics import shard_metrics
from kvpool.server.metrics.observations import JournalCounts, Observations
from kvpool.server.metrics.pool_metrics import PoolSample, copy_histograms
from kvpool.server.metrics.server_metrics import sampler, server_metrics
from kvpool.v1.pool_pb2 import PoolInfo, RankInfo, RankState
from kvpool.wire.metrics_pages import LogCollector
from support.core import World
from support.shard_figures import shard_member

LIMITS: Final = (
    *("max_memory_bytes", "container_memory", "journal_max_bytes"),
    *("max_pools", "max_total_blocks", "max_sessions", "max_total_requests", "max_total_tokens"),
)
"""Values of the label `limit`."""
Samples: TypeAlias = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True, slots=True)
class FixedCredentials:
    """Credentials that do not change."""

    age_seconds: float
    expires_seconds: float | None


class StandingRank:
    """A rank that does nothing."""

    def __init__(self, status: WorkerStatus, usage: WorkerUsage) -> None:
        self.status = status
        self.usage = usage

    def device_memory(self) -> DeviceMemory:
        """Memory of a device that does not exist."""
        return DeviceMemory(1000, 400)


class _Fixed(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics


def sample_of(info: PoolInfo, seen: Observations, kept: BlockLifetimes | None = None) -> PoolSample:
    """The figures of a pool."""
    histograms = copy_histograms(kept, seen.steps.get(PoolName(info.config.name)))
    return PoolSample(info, histograms, {0.5: -30, 2.0: 20, 4.0: 50})


def info_of(world: World) -> PoolInfo:
    """The state of the pool of a world."""
    return world.info(3)


def scrape(pools: list[tuple[PoolInfo, BlockLifetimes | None]], seen: Observations, *, with_vllm: bool = False) -> str:
    """The page of a server of a shard, with a journal, credentials and a limit."""

    def sample_pools() -> list[PoolSample]:
        return [sample_of(info, seen, kept) for info, kept in pools]

    def other_metrics(pools: Sequence[PoolSample]) -> Iterator[Metric]:
        credentials = {"tokens": FixedCredentials(1.5, 1.9e9), "certificates": FixedCredentials(0.5, 2e9)}
        journal = JournalCounts(is_up=True, size_bytes=7, records=3)
        yield from server_metrics(credentials, dict.fromkeys(LIMITS, len(pools) / 4), journal)
        yield from shard_metrics(shard_member())

    registry = CollectorRegistry()
    registry.register(LogCollector())  # the HTTP server adds it
    sample = sampler(sample_pools, seen, other_metrics, with_vllm=with_vllm)
    registry.register(_Fixed(sample()()))
    return generate_latest(registry).decode()


def worker_page() -> str:
    """The page of a rank, without the figures of its process."""
    settings = WorkerSettings("unix:/s", "m", 0, 1, RankGroupOptions(16))
    status, usage = WorkerStatus(Phase.READY, 7, 100, PoolState.READY), WorkerUsage(1, last_heartbeat_seconds=1.0)
    registry = CollectorRegistry()
    registry.register(WorkerCollector(StandingRank(status, usage), settings))
    return generate_latest(registry).decode()


def samples_of(text: str) -> Samples:
    """The samples of a page, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }


def some_observations() -> Observations:
    """A call that ended with each status code."""
    seen = Observations()
    for code in grpc.StatusCode:
        seen.rpc("m", code.name, 0.1)
    return seen


def exported_labels() -> dict[str, dict[str, set[str]]]:
    """Each metric that a server, a rank or its process can export, with its labels and their values."""
    seen = some_observations()
    info = info_of(World(12, num_host_blocks=4))
    info.ranks.extend(RankInfo(state=state) for state in RankState.values()[1:])
    page = scrape([(info, None)], seen, with_vllm=True)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    found: dict[str, dict[str, set[str]]] = {}
    processes = generate_latest(registry).decode()
    for name, labels in (*samples_of(page), *samples_of(worker_page()), *samples_of(processes)):
        values = found.setdefault(name, defaultdict(set))
        for label, value in labels:
            values[label].add(value)
    return found
