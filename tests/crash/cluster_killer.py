"""Kills, stops and cuts off the servers of a shard, and a minority of etcd, at random."""

import signal
import time
from collections.abc import Callable

from crash.cluster import ClusterSite
from crash.killer import Killer
from support.pair import PairServer


class ClusterKiller(Killer):
    """See `Killer`. A stopped rank is back before its epoch passes."""

    rank_stops_seconds = (2.5,)

    def __init__(self, site: ClusterSite) -> None:
        self._cluster = site
        self._break = self._isolate if site.plan.has_hosts else self._cut
        super().__init__(site)

    def run(self, kills: int, on_kill: Callable[[int], object] = lambda _: None) -> None:
        """See `Killer.run`."""
        super().run(kills, on_kill)
        self._cluster.wait_in_sync()

    def _server_acts(self) -> list[tuple[Callable[[], None], int]]:
        return [
            (self._kill_primary, 8),
            (self._kill_standby, 4),
            (self._kill_both, 2),
            (self._stop_one, 5),
            (self._break, 6),
            (self._hand_over, 3),
            (self._strike_etcd, 4),
        ]

    def _kill_primary(self) -> None:
        self._kill(self._cluster.primary(), "SIGKILL of the primary")

    def _kill_standby(self) -> None:
        self._kill(self._cluster.pair.other(self._cluster.primary()), "SIGKILL of the standby")

    def _kill(self, server: PairServer, how: str) -> None:
        self._struck("kill", how, server)
        server.kill()
        time.sleep(self._chance.choice([0.0, 0.0, 1.5]))
        self._cluster.start_one(server, self._cluster.faults())
        self._go_on()

    def _kill_both(self) -> None:
        self._struck("kill", "SIGKILL of both", *self._cluster.pair.servers)
        for server in self._cluster.pair.servers:
            server.kill()
        for server in self._cluster.pair.servers:
            self._cluster.start_one(server)
        self._go_on()

    def _stop_one(self) -> None:
        """Stops a server, for less or longer than the time after which the other continues without it."""
        server = self._chance.choice(self._cluster.pair.servers)
        is_primary = server is self._cluster.primary()
        self._struck("stop", f"SIGSTOP of the {'primary' if is_primary else 'standby'}", server)
        server.pause()
        self._site.log.write("paused", server=server.address)
        time.sleep(self._chance.uniform(0.2, 3.0))
        self._site.log.write("continued", server=server.address)
        server.resume()
        self._go_on()

    def _cut(self) -> None:
        """Cuts the connection between primary and standby in one direction or in both."""
        primary = self._cluster.primary()
        link = primary.link
        assert link
        way = self._chance.choice(["both ways", "to the primary", "to the standby"])
        self._struck("stop", f"cut {way}", primary)
        {"both ways": link.cut, "to the primary": link.cut_to_server, "to the standby": link.cut_to_client}[way]()
        time.sleep(self._chance.uniform(0.2, 3.0))
        link.heal()
        self._site.log.write("healed")
        self._go_on()

    def _isolate(self) -> None:
        """Takes the host of a server off the network. The clients of a primary are cut off too."""
        server = self._chance.choice(self._cluster.pair.servers)
        is_primary = server is self._cluster.primary()
        self._struck("stop", f"isolation of the {'primary' if is_primary else 'standby'}", server)
        server.host.isolate()
        time.sleep(self._chance.uniform(0.2, 3.0))
        server.host.heal()
        self._site.log.write("healed")
        self._go_on()

    def _hand_over(self) -> None:
        server = self._cluster.primary()
        self._struck("stop", "SIGTERM of the primary", server)
        server.process.signal(signal.SIGTERM)
        server.process.end()
        self._cluster.start_one(server)
        self._go_on()

    def _strike_etcd(self) -> None:
        """Kills or stops one node of etcd while something happens to a server."""
        node = self._chance.choice(self._cluster.etcd.nodes)
        kills = self._chance.random() < 0.5
        self._site.log.write("kill" if kills else "stop", target="etcd", how="SIGKILL" if kills else "SIGSTOP")
        if kills:
            node.kill()
        else:
            node.pause()
        self._chance.choice([self._kill_primary, self._kill_standby, self._stop_one, self._break])()
        if kills:
            self._cluster.etcd.start(node)
        else:
            node.resume()

    def _struck(self, kind: str, how: str, *servers: PairServer) -> None:
        self._site.log.write(kind, target="server", how=how, servers=[server.address for server in servers])

    def _go_on(self) -> None:
        """Waits until steps are answered, and mostly until the servers are in sync."""
        self._site.wait_for_steps(self._slots, every=False)
        if self._chance.random() < 0.7:
            self._cluster.wait_in_sync()
