"""Prometheus metrics of a rank, read at each scrape. Does not import torch or use threads of the worker.

An engine that embeds a `Worker` and serves metrics itself registers the collector in its own registry:
`REGISTRY.register(WorkerCollector(worker, settings))`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from prometheus_client import Metric
from prometheus_client.registry import Collector

from kvpool.core.ranks.messages import PoolState
from kvpool.gpu_worker.rank_protocol import Phase
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import DeviceMemory, WorkerStatus, WorkerUsage
from kvpool.wire.http_server import HttpServer
from kvpool.wire.metric_families import Row, families, family
from kvpool.wire.metrics_pages import MetricsPages, Readiness

_LABELS = ("pool", "rank")
_STATUS: Final[dict[str, Row[WorkerStatus]]] = {
    "kvpool_worker_epoch": Row("The epoch whose steps may run; 0 for none.", "epoch"),
    "kvpool_worker_blocks": Row("Number of blocks of the pool in that epoch.", "num_blocks"),
}
_USAGE: Final[dict[str, Row[WorkerUsage]]] = {
    "kvpool_worker_allocated_bytes": Row("Memory of the rank's tensors.", "allocated_bytes"),
    "kvpool_worker_available_bytes": Row(
        "Memory that the tensors may take, as reported to the server.", "available_bytes"
    ),
    "kvpool_worker_steps_in_flight": Row(
        "Admitted steps that are not done; blocks of an ended session wait for its steps.", "steps_in_flight"
    ),
    "kvpool_worker_mapping_processes": Row(
        "Processes that may map the memory, of a rank that lends it.", "mapping_processes"
    ),
    "kvpool_worker_host_bytes": Row("Host memory for evicted blocks, of a rank that lends its memory.", "host_bytes"),
    "kvpool_worker_heartbeats_total": Row("Heartbeats of the rank that the server answered.", "heartbeats"),
    "kvpool_worker_joins_total": Row("Streams on which the server accepted the rank.", "joins"),
}


class Observed(Protocol):
    """The part of a `Worker` that is observed. No method may wait for another thread."""

    @property
    def status(self) -> WorkerStatus:
        """The status of the rank."""

    @property
    def usage(self) -> WorkerUsage:
        """Memory, stream and step counts of the rank."""

    def device_memory(self) -> DeviceMemory:
        """Memory of the device."""


class WorkerCollector(Collector):
    """The metrics of one rank. Thread-safe."""

    def __init__(self, worker: Observed, settings: WorkerSettings) -> None:
        self._worker = worker
        self._labels = (settings.pool, str(settings.rank))

    def collect(self) -> Iterator[Metric]:
        """Reads all metrics."""
        status, usage, memory = self._worker.status, self._worker.usage, self._worker.device_memory()
        yield from families(_STATUS, _LABELS, [(self._labels, status)])
        yield from families(_USAGE, _LABELS, [(self._labels, usage)])
        phases = {phase.value: phase is status.phase for phase in Phase}
        yield self._by_label("kvpool_worker_state", "1 for the current phase of the rank, else 0.", "state", phases)
        yield self._by_label(
            "kvpool_worker_pool_state",
            "1 for the state of the pool as the server last reported it, else 0.",
            "state",
            {state.value: state is status.pool_state for state in PoolState},
        )
        yield self._by_label(
            "kvpool_worker_device_memory_bytes",
            "Memory of the rank's device, for all processes; on CPU of the machine, within the control group's limit.",
            "kind",
            {"total": memory.total_bytes, "free": memory.free_bytes},
        )
        beat_seconds = usage.last_heartbeat_seconds
        yield family(
            "kvpool_worker_last_heartbeat_timestamp_seconds",
            "Time of the last answered heartbeat, since 1970; absent before the first.",
            _LABELS,
            [] if beat_seconds is None else [(self._labels, beat_seconds)],
        )

    def readiness(self) -> Readiness:
        """Returns whether the rank is part of a ready pool."""
        status = self._worker.status
        return Readiness(status.is_serving, "" if status.is_serving else status.describe().replace("\n", " "))

    def _by_label(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        samples = [((*self._labels, label_value), value) for label_value, value in values.items()]
        return family(name, text, (*_LABELS, label), samples)


@contextmanager
def metrics_served(collector: WorkerCollector, host: str, port: int) -> Iterator[int]:
    """Serves the metrics of a collector and of the process by HTTP; yields the port.

    Args:
        collector: The metrics to serve.
        host: Address or host name to listen on.
        port: Port to listen on; 0 for a free one.

    Raises:
        OSError: The address cannot be bound.
    """
    server = HttpServer(host, port, MetricsPages(collector, collector.readiness).handlers)
    try:
        yield server.port
    finally:
        server.stop()
