"""The metrics of a rank that stands still. A rank's life is in tests/integration/test_worker_endpoints.py."""

import contextlib
import socket
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvpool.core.ranks.messages import PoolState, RankGroupOptions
from kvpool.gpu_worker.rank_protocol import Phase
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import WorkerStatus, WorkerUsage
from kvpool.gpu_worker.worker_health import health_served
from kvpool.gpu_worker.worker_metrics import WorkerCollector, metrics_served
from support.exported_metrics import StandingRank
from support.waiting import DEADLINE_SECONDS

SETTINGS = WorkerSettings("unix:/s", "m", 3, 4, RankGroupOptions(16))
READY = WorkerStatus(Phase.READY, 7, 100, PoolState.READY)


def values(text: str) -> dict[tuple[str, ...], float]:
    """By name and what tells samples of a name apart: the values of our own metrics that are not 0."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("kvpool_worker_"):
                labels = dict(sample.labels)
                assert (labels.pop("pool"), labels.pop("rank")) == ("m", "3")
                found[sample.name, *labels.values()] = sample.value
    return {key: value for key, value in found.items() if value}


def scraped(status: WorkerStatus, usage: WorkerUsage) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(WorkerCollector(StandingRank(status, usage), SETTINGS))
    return values(generate_latest(registry).decode())


def test_a_rank_that_is_ready() -> None:
    assert scraped(READY, WorkerUsage(900, 800, 2, 50, 1795270405.5, 3, 4, 700)) == {
        ("kvpool_worker_state", "ready"): 1,
        ("kvpool_worker_pool_state", "ready"): 1,
        ("kvpool_worker_epoch",): 7,
        ("kvpool_worker_blocks",): 100,
        ("kvpool_worker_allocated_bytes",): 800,
        ("kvpool_worker_available_bytes",): 900,
        ("kvpool_worker_host_bytes",): 700,
        ("kvpool_worker_mapping_processes",): 4,
        ("kvpool_worker_device_memory_bytes", "total"): 1000,
        ("kvpool_worker_device_memory_bytes", "free"): 400,
        ("kvpool_worker_heartbeats_total",): 50,
        ("kvpool_worker_last_heartbeat_timestamp_seconds",): 1795270405.5,
        ("kvpool_worker_joins_total",): 2,
        ("kvpool_worker_steps_in_flight",): 3,
    }


def test_a_rank_before_any_message() -> None:
    found = scraped(WorkerStatus(Phase.JOINING), WorkerUsage(900))
    assert found["kvpool_worker_state", "joining"] == 1
    assert not [key for key in found if key[0] in ("kvpool_worker_pool_state", "kvpool_worker_epoch")]
    assert ("kvpool_worker_last_heartbeat_timestamp_seconds",) not in found, "no beat is not a beat in 1970"


def test_metrics_are_served_with_those_of_the_process() -> None:
    collector = WorkerCollector(StandingRank(READY, WorkerUsage(900)), SETTINGS)
    with metrics_served(collector, "127.0.0.1", 0) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_SECONDS) as answer:
            text = answer.read().decode()
        assert values(text)["kvpool_worker_epoch",] == 7
        assert "process_resident_memory_bytes " in text
        assert "python_gc_collections_total{" in text
        with pytest.raises(OSError, match="in use"), metrics_served(collector, "127.0.0.1", port):
            pass
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize(
    "status",
    [
        WorkerStatus(Phase.JOINING),
        WorkerStatus(Phase.READY, 0, 0, PoolState.READY),
        WorkerStatus(Phase.READY, 7, 100, PoolState.DEGRADED, (1,)),
        WorkerStatus(Phase.REJOINING, 7, 100, PoolState.READY),
    ],
    ids=["joining", "tensors not bound", "degraded", "server gone"],
)
def test_only_a_rank_of_a_ready_pool_is_healthy(status: WorkerStatus, tmp_path: Path) -> None:
    with health_served(f"unix:{tmp_path}/h") as (address, on_status), grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING, "at first"
        on_status(READY)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        on_status(status)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_the_health_socket_of_a_later_worker_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "h"
    with contextlib.ExitStack() as later:
        with health_served(f"unix:{path}"):
            path.unlink()
            address, _ = later.enter_context(health_served(f"unix:{path}"))
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(DEADLINE_SECONDS)
    assert not path.exists()


def test_a_health_address_in_use_is_refused(tmp_path: Path) -> None:
    for address, words in (("127.0.0.1:0", "in use"), (f"unix:{tmp_path}/h", "another server listens")):
        with health_served(address) as (bound, _), pytest.raises(OSError, match=words), health_served(bound):
            pass
