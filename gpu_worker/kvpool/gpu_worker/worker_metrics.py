"""Prometheus metrics of a rank, read at each scrape. Does not import torch or use threads of the worker.

An engine that embeds a `Worker` and serves metrics itself registers the collector in its own registry:
`REGISTRY.register(WorkerCollector(worker, settings))`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool.core.ranks.messages import PoolState
from kvpool.gpu_worker.rank_protocol import Phase
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import DeviceMemory, WorkerStatus, WorkerUsage
from kvpool.wire.http_server import HttpServer
from kvpool.wire.metrics_pages import MetricsPages, Readiness

_LABELS = ("pool", "rank")


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
        status, usage = self._worker.status, self._worker.usage
        phases = {phase.value: float(phase is status.phase) for phase in Phase}
        yield self._gauges("kvpool_worker_state", "1 for the current phase of the rank, else 0.", "state", phases)
        yield self._gauges(
            "kvpool_worker_pool_state",
            "1 for the state of the pool as the server last reported it, else 0.",
            "state",
            {state.value: float(state is status.pool_state) for state in PoolState},
        )
        yield self._gauge("kvpool_worker_epoch", "The epoch whose steps may run; 0 for none.", status.epoch)
        yield self._gauge("kvpool_worker_blocks", "Number of blocks of the pool in that epoch.", status.num_blocks)
        yield self._gauge("kvpool_worker_allocated_bytes", "Memory of the rank's tensors.", usage.allocated_bytes)
        yield self._gauge(
            "kvpool_worker_available_bytes",
            "Memory that the tensors may take, as reported to the server.",
            usage.available_bytes,
        )
        memory = self._worker.device_memory()
        yield self._gauges(
            "kvpool_worker_device_memory_bytes",
            "Memory of the rank's device, for all processes; on CPU of the machine, within the control group's limit.",
            "kind",
            {"total": memory.total_bytes, "free": memory.free_bytes},
        )
        yield self._gauge(
            "kvpool_worker_steps_in_flight",
            "Admitted steps that are not done; blocks of an ended session wait for its steps.",
            usage.steps_in_flight,
        )
        yield self._gauge(
            "kvpool_worker_mapping_processes",
            "Processes that may map the memory, of a rank that lends it.",
            usage.mapping_processes,
        )
        yield self._counter(
            "kvpool_worker_heartbeats", "Heartbeats of the rank that the server answered.", usage.heartbeats
        )
        yield self._gauge(
            "kvpool_worker_last_heartbeat_timestamp_seconds",
            "Time of the last answered heartbeat, since 1970; absent before the first.",
            usage.last_heartbeat_seconds,
        )
        yield self._counter("kvpool_worker_joins", "Streams on which the server accepted the rank.", usage.joins)

    def readiness(self) -> Readiness:
        """Returns whether the rank is part of a ready pool."""
        status = self._worker.status
        return Readiness(status.is_serving, "" if status.is_serving else status.describe().replace("\n", " "))

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """A gauge for each value of a label."""
        family = GaugeMetricFamily(name, text, labels=(*_LABELS, label))
        for label_value, value in values.items():
            family.add_metric((*self._labels, label_value), value)
        return family

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        if value is not None:
            family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


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
