"""The processes of a run in which two servers share a shard: etcd with three nodes, the servers, schedulers, ranks."""

import random
import re
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Final

from crash.site import SERVER_TIMING, Plan, Site, send
from support.etcd import EtcdCluster
from support.hosts import Hosts
from support.pair import Pair, PairServer

_NODES: Final = 3
_TIMING: Final = (*SERVER_TIMING, "--rank-grace-seconds", "30")
"""A new primary gives up a rank that has not joined again within the grace time, which a busy rank must not miss."""
_BECAME_PRIMARY: Final = re.compile(r"([\d-]+ [\d:]+,\d+) \w+ [\w.]+: became primary")
_POINTS: Final = ("step.decoded", "step.applied", "step.answered", "journal.before_write", "snapshot.slice_written")
"""Fault points at which a server may die by itself."""


class ClusterSite(Site):
    """See `Site`. Its methods for the server mean the primary.

    Attributes:
        etcd: The directory's etcd.
        pair: The servers.
    """

    expected_errors = ("directory cannot be used",)

    def __init__(self, folder: Path, plan: Plan) -> None:
        super().__init__(folder, plan)
        self._network = Hosts(2) if plan.has_hosts else None
        hosts = self._network.hosts if self._network else ()
        self.etcd = EtcdCluster(folder / "etcd", _NODES, addresses=self._network.addresses if self._network else ())
        url = f"etcd://{','.join(self.etcd.endpoints)}/crash"
        self.pair = Pair(folder, url, [*_TIMING, *plan.options], is_cuttable=not hosts, hosts=hosts)
        self.address = self.pair.seeds
        self._chance = random.Random(plan.seed)  # noqa: S311 - a test's dice

    def start_server(self, faults: str = "") -> bool:
        """Starts the servers that do not run, and waits until they are in sync."""
        for server in self.pair.servers:
            if not server.is_alive:
                self.start_one(server, faults)
        self.wait_in_sync()
        return True

    def start_one(self, server: PairServer, faults: str = "") -> None:
        """Starts a server that does not run."""
        self.log.write("starting one", server=server.address, faults=faults)
        self.servers.append(server.start(self.plan.command, faults=faults))

    def faults(self) -> str:
        """A fault point at which a server dies some time after it became the primary; mostly none."""
        if self._chance.random() > 0.3:
            return ""
        count = 1 if (point := self._chance.choice(_POINTS)).startswith("snapshot") else self._chance.randint(1, 400)
        return f"{point}:kill:{count}"

    def signal_server(self, number: signal.Signals) -> None:
        """Kills, stops or continues the primary."""
        send(self.primary().process, number)

    def primary(self) -> PairServer:
        """Waits for the primary; restarts servers that die meanwhile."""
        return self.pair.primary(meanwhile=self.check_alive)

    def wait_in_sync(self) -> None:
        """Waits until the servers are in sync; restarts those that die meanwhile."""
        try:
            self.pair.wait_in_sync(meanwhile=self.check_alive)
        except AssertionError as error:
            self.log.write("violation", what="NOT_IN_SYNC", error=str(error)[-5000:])

    def check_alive(self) -> None:
        """See `Site.check_alive`. Restarts servers that died at a fault point."""
        super().check_alive()
        for server in self.pair.servers:
            if server.is_alive:
                continue
            status = server.process.end()
            if status == -signal.SIGKILL:
                self.log.write("kill", target="server", how="at a fault point", servers=[server.address])
            else:
                lines = server.process.lines[-30:]
                self.log.write("violation", what="SERVER_ENDED", status=status, lines=lines)
            self.start_one(server)

    def close(self) -> None:
        """See `Site.close`. Logs when servers became the primary, by the times in their own logs."""
        super().close()
        since_boot = time.monotonic() - time.time()
        for server in self.pair.servers:
            for line in (line for process in server.processes for line in process.lines):
                if found := _BECAME_PRIMARY.match(line):
                    at = datetime.fromisoformat(found[1]).timestamp() + since_boot
                    self.log.write("became primary", server=server.address, at=at)
        self.pair.close()
        self.etcd.kill()
        if self._network:
            self._network.close()
