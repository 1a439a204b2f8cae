"""What a rank's metrics and health say over its life: real processes, HTTP and gRPC."""

import re
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from support.server import ServerProcess
from support.waiting import DEADLINE_SECONDS, wait_until
from support.workers import BLOCK_BYTES, WorkerProcess, Workers, ready

TIMING = {"heartbeat_seconds": 0.1, "heartbeat_timeout_seconds": 2.0, "grace_seconds": 60.0}
FLAGS = ("--metrics-listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0")


def listens_on(worker: WorkerProcess, what: str) -> str:
    """Where a worker says that it answers."""
    found = re.search(r"address=(\S+)", worker.wait_for(f"{what} listening"))
    assert found
    return found[1]


class Endpoints:
    """Where one worker answers."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._metrics, self._health = listens_on(worker, "metrics"), listens_on(worker, "health")

    def metrics(self) -> dict[str, float]:
        """Values by name; a label that tells samples of one name apart follows after a colon."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=DEADLINE_SECONDS) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.startswith("kvpool_worker_"):
                more = [value for name, value in sample.labels.items() if name not in ("pool", "rank")]
                found[":".join([sample.name.removeprefix("kvpool_worker_"), *more])] = sample.value
        return found

    def states(self) -> tuple[str, str, bool]:
        """Where the rank stands, how it thinks the pool is, and whether it is healthy."""
        metrics = self.metrics()
        phases = [name.partition(":")[2] for name, value in metrics.items() if name.startswith("state:") and value]
        pools = [name.partition(":")[2] for name, value in metrics.items() if name.startswith("pool_state:") and value]
        (phase,) = phases
        return phase, "".join(pools), self.is_healthy()

    def is_healthy(self) -> bool:
        with grpc.insecure_channel(self._health) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS
            )
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_for(self, phases: str, pool: str, *, healthy: bool) -> None:
        wait_until(lambda: self._stands(phases, pool, healthy=healthy), f"{phases}, {pool}, {healthy}")

    def _stands(self, phases: str, pool: str, *, healthy: bool) -> bool:
        phase, state, is_healthy = self.states()
        return (phase in phases, state, is_healthy) == (True, pool, healthy)


def test_endpoints_answer_from_before_the_server_starts_until_the_rank_ends(workers: Workers, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    first = workers.start(address, 0, 2, *FLAGS)
    endpoints = Endpoints(first)
    first.wait_for("stream ended, joining again")
    endpoints.wait_for("joining rejoining", "", healthy=False)
    assert endpoints.metrics()["joins_total"] == 0
    assert endpoints.metrics()["available_bytes"] == 100 * BLOCK_BYTES

    server = ServerProcess(address, rank_timing=TIMING)
    endpoints.wait_for("registered", "forming", healthy=False)

    second = workers.start(address, 1, 2)
    first.wait_for(ready(1))
    endpoints.wait_for("ready", "ready", healthy=True)
    metrics = endpoints.metrics()
    assert (metrics["epoch"], metrics["blocks"], metrics["joins_total"]) == (1, 100, 1)
    assert metrics["allocated_bytes"] == 100 * BLOCK_BYTES
    assert 0 < metrics["device_memory_bytes:free"] <= metrics["device_memory_bytes:total"]
    wait_until(lambda: endpoints.metrics()["heartbeats_total"] > metrics["heartbeats_total"], "heartbeats go on")
    assert endpoints.metrics()["last_heartbeat_timestamp_seconds"] >= metrics["last_heartbeat_timestamp_seconds"]

    second.pause()
    endpoints.wait_for("ready", "degraded", healthy=False)
    assert endpoints.metrics()["epoch"] == 1, "it may still come back"
    second.resume()
    endpoints.wait_for("ready", "ready", healthy=True)

    server.kill()
    endpoints.wait_for("joining rejoining", "ready", healthy=False)
    assert endpoints.metrics()["allocated_bytes"] == 100 * BLOCK_BYTES, "it keeps its tensors"

    server.restart()
    first.wait_for(ready(2))
    endpoints.wait_for("ready", "ready", healthy=True)
    assert (endpoints.metrics()["epoch"], endpoints.metrics()["joins_total"]) == (2, 2)

    for worker in (first, second):
        assert worker.stop() == 0
    with pytest.raises(urllib.error.URLError):
        endpoints.metrics()
    with pytest.raises(grpc.RpcError):
        endpoints.is_healthy()
    server.stop_cleanly()


@pytest.mark.slow
def test_an_address_in_use_ends_the_worker_with_one_line(workers: Workers, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/no-server"
    first = workers.start(address, 0, 1, *FLAGS)
    for what in ("metrics", "health"):
        where = listens_on(first, what)
        second = workers.start(address, 0, 1, f"--{what}-listen", where)
        assert second.end() == 1
        second.wait_for(f"^Error: --{what}-listen: cannot listen on {where}: .*in use")
