"""What a pair of real servers reports: to Prometheus, to a load balancer and to `kvpool health`."""

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client import connect
from kvpool.client.admin import AdminClient
from support.command import kvpool
from support.etcd import EtcdCluster, etcd_cluster, needs_etcd
from support.server import CommandLineServer, free_port, pool_config
from support.waiting import DEADLINE_SECONDS, wait_until

pytestmark = needs_etcd


class _Server(CommandLineServer):
    """A server that belongs to a shard."""

    def __init__(self, folder: Path, etcd: EtcdCluster) -> None:
        self.address, self._metrics, replication = (f"127.0.0.1:{free_port()}" for _ in range(3))
        options = ["--metrics-listen", self._metrics, "--replication-listen", replication, "--journal", folder]
        options += ["--cluster", f"etcd://{','.join(etcd.endpoints)}/llama"]
        options += ["--takeover-seconds", "30", "--standby-timeout-seconds", "30"]  # the machine may be busy
        super().__init__(self.address, options=options, waits=False)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page of the metrics address; 0 while it is not open."""
        try:
            with urllib.request.urlopen(f"http://{self._metrics}{path}", timeout=DEADLINE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def value(self, name: str, labels: str = 'shard="llama"') -> float | None:
        """The value of a sample; None if there is none."""
        status, text = self.get("/metrics")
        assert status in (0, 200), text
        found = re.search(rf"^{name}{{{re.escape(labels)}}} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else None

    def is_(self, role: str) -> bool:
        return self.value("kvpool_shard_role", f'role="{role}",shard="llama"') == 1

    def health(self, *options: str) -> int:
        """Exit status of `kvpool health`."""
        return kvpool("health", self.address, *options).returncode


@pytest.fixture(name="etcd")
def fixture_etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster() as cluster:
        yield cluster


@pytest.mark.slow
def test_a_pair_reports_its_roles_a_takeover_and_a_lost_directory(tmp_path: Path, etcd: EtcdCluster) -> None:
    first = _Server(tmp_path / "first", etcd)
    servers = [first]
    try:
        wait_until(lambda: first.is_("primary"))
        wait_until(lambda: first.value("kvpool_shard_alone") == 1)
        second = _Server(tmp_path / "second", etcd)
        servers.append(second)
        wait_until(lambda: first.value("kvpool_shard_alone") == 0)
        with connect(first.address) as client:
            client.create_pool(pool_config("m"))
        with AdminClient(f"{second.address},{first.address}") as admin:
            info = admin.overview().server
            assert (info.shard, info.term) == ("llama", 1)
        wait_until(lambda: first.value("kvpool_shard_confirm_seconds_count") == 1)
        assert first.value("kvpool_shard_in_sync_servers") == 2
        assert first.value("kvpool_shard_standbys_connected") == 1
        assert first.value("kvpool_pool_epoch", 'pool="m"')
        wait_until(lambda: second.get("/readyz")[0] == 200)
        assert second.get("/readyz")[1].startswith("ok; standby: ")
        wait_until(lambda: second.is_("standby"))
        assert second.value("kvpool_pool_epoch", 'pool="m"') is None
        assert [server.health() for server in servers] == [0, 0]
        assert [server.health("--service", "kvpool.v1.AllocatorService") for server in servers] == [0, 1]
        first.kill()
        wait_until(lambda: second.is_("primary"))
        assert second.value("kvpool_shard_term") == 2
        assert second.value("kvpool_shard_takeovers_total") == second.value("kvpool_shard_directory_up") == 1
        wait_until(lambda: second.value("kvpool_shard_alone") == 1)
        wait_until(lambda: second.value("kvpool_pool_epoch", 'pool="m"') is not None)
        etcd.kill()
        wait_until(lambda: second.value("kvpool_shard_directory_up") == 0)
        assert second.get("/readyz") == (200, "ok\n")
    finally:
        for server in servers:
            server.kill()
