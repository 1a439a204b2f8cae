"""What a pair of real servers reports: to Prometheus, to a load balancer and to `kvpool health`."""

import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.client import connect
from kvpool.client.admin import AdminClient
from support import processes
from support.etcd import EtcdCluster, etcd_cluster, needs_etcd
from support.server import free_port, pool_config

KVPOOL = str(Path(sys.executable).with_name("kvpool"))
WAIT_SECONDS = 60.0
pytestmark = needs_etcd


class _Server:
    """A process of `kvpool serve` that belongs to a shard."""

    def __init__(self, folder: Path, etcd: EtcdCluster) -> None:
        self.address, self._metrics, replication = (f"127.0.0.1:{free_port()}" for _ in range(3))
        command = [KVPOOL, "serve", "--listen", self.address, "--metrics-listen", self._metrics]
        command += ["--journal", str(folder), "--cluster", f"etcd://{','.join(etcd.endpoints)}/prod"]
        command += ["--shard", "llama", "--replication-listen", replication]
        command += ["--takeover-seconds", "30", "--standby-timeout-seconds", "30"]  # the machine may be busy
        self.process = processes.start(command, stderr=processes.DEVNULL)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page of the metrics address; 0 while it is not open."""
        try:
            with urllib.request.urlopen(f"http://{self._metrics}{path}", timeout=WAIT_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def value(self, name: str, labels: str = 'shard="prod/llama"') -> float | None:
        """The value of a sample; None if there is none."""
        status, text = self.get("/metrics")
        assert status in (0, 200), text
        found = re.search(rf"^{name}{{{re.escape(labels)}}} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else None

    def is_(self, role: str) -> bool:
        return self.value("kvpool_shard_role", f'role="{role}",shard="prod/llama"') == 1

    def health(self, *options: str) -> int:
        """Exit status of `kvpool health`."""
        return processes.run([KVPOOL, "health", self.address, *options], capture_output=True, check=False).returncode


@pytest.fixture(name="etcd")
def fixture_etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster() as cluster:
        yield cluster


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_pair_reports_its_roles_a_takeover_and_a_lost_directory(tmp_path: Path, etcd: EtcdCluster) -> None:
    first = _Server(tmp_path / "first", etcd)
    servers = [first]
    try:
        until(lambda: first.is_("primary"))
        until(lambda: first.value("kvpool_shard_alone") == 1)
        second = _Server(tmp_path / "second", etcd)
        servers.append(second)
        until(lambda: first.value("kvpool_shard_alone") == 0)
        with connect(first.address) as client:
            client.create_pool(pool_config("m"))
        with AdminClient(f"{second.address},{first.address}") as admin:
            info = admin.overview().server
            assert (info.shard, info.term) == ("prod/llama", 1)
        until(lambda: first.value("kvpool_shard_confirm_seconds_count") == 1)
        assert first.value("kvpool_shard_in_sync_servers") == 2
        assert first.value("kvpool_shard_standbys_connected") == 1
        assert first.value("kvpool_pool_epoch", 'pool="m"')
        until(lambda: second.get("/readyz")[0] == 200)
        assert second.get("/readyz")[1].startswith("ok; standby: ")
        until(lambda: second.is_("standby"))
        assert second.value("kvpool_pool_epoch", 'pool="m"') is None
        assert [server.health() for server in servers] == [0, 0]
        assert [server.health("--service", "kvpool.v1.AllocatorService") for server in servers] == [0, 1]
        first.process.kill()
        until(lambda: second.is_("primary"))
        assert second.value("kvpool_shard_term") == 2
        assert second.value("kvpool_shard_takeovers_total") == second.value("kvpool_shard_directory_up") == 1
        until(lambda: second.value("kvpool_shard_alone") == 1)
        until(lambda: second.value("kvpool_pool_epoch", 'pool="m"') is not None)
        etcd.kill()
        until(lambda: second.value("kvpool_shard_directory_up") == 0)
        assert second.get("/readyz") == (200, "ok\n")
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()
