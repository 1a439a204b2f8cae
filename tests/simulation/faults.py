"""The faults of a schedule: kinds, frequency and times are drawn; all faults end before the schedule does."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from simulation.distant_directory import DIRECTORY
from simulation.world import DEAD_PEER_SECONDS

if TYPE_CHECKING:
    from simulation.schedule import Schedule


class Faults:
    """The faults of one schedule.

    Attributes:
        num_faults: Number of faults.
    """

    def __init__(self, schedule: "Schedule", until_seconds: float) -> None:
        self._schedule = schedule
        self._random = schedule.random
        self._until_seconds = until_seconds
        self.num_faults = 0
        kill, name = schedule.kill, self._name
        kinds: list[Callable[[], object]] = [
            self._sever_call,
            self._sever_host,
            self._cut,
            self._slow_down,
            lambda: self._stop(name("")),
            lambda: kill(name("server")),
            schedule.kill_server_in_a_write,
            lambda: kill(name("rank")),
            lambda: [kill(each) for each in list(schedule.processes) if not each.startswith("scheduler")],
            lambda: kill(name("scheduler")),
            self._repeat,
            schedule.operate,
            self._lose,
            self._lose,
        ]
        if schedule.draw.is_shard:
            servers = schedule.draw.servers
            kinds += [
                self._cut_servers,
                self._cut_servers,
                lambda: self._cut_ways([way for server in servers for way in _both(server, DIRECTORY)]),
                self._isolate_primary,
                self._isolate_primary,
                lambda: self._stop(self._primary_name()),
                lambda: kill(self._primary_name()),
                lambda: kill(self._primary_name()),
                lambda: [kill(server) for server in servers],
                schedule.lose_machines,
                lambda: schedule.terminate(name("server")),
            ]
        self._kinds = self._random.sample(kinds, self._random.choice((0, 1, 2, 3, 5, len(kinds))))
        self._mean_seconds = self._random.choice((0.2, 0.5, 1.0, 2.0))

    def start(self) -> None:
        """Starts injecting faults."""
        if self._kinds:
            self._later(self._strike)

    def _later(self, callback: Callable[[], None]) -> None:
        network = self._schedule.network
        network.at(network.loop.now_seconds + self._random.expovariate(1 / self._mean_seconds), callback)

    def _strike(self) -> None:
        if self._schedule.loop.now_seconds < self._until_seconds and self._schedule.schedulers_left:
            self.num_faults += 1
            self._random.choice(self._kinds)()
            self._later(self._strike)

    def _for_a_while(self, end: Callable[[], None]) -> None:
        """Ends a fault after a time that is mostly short, and sometimes longer than any lease."""
        network = self._schedule.network
        left_seconds = max(self._until_seconds - network.loop.now_seconds, 0.0)
        network.at(network.loop.now_seconds + min(self._random.expovariate(1.0), left_seconds), end)

    def _name(self, *prefixes: str) -> str:
        names: list[str] = [name for name in self._schedule.processes if name.startswith(prefixes)]
        return self._random.choice(names)

    def _sever_call(self) -> None:
        calls = [call for server in self._schedule.wire.listeners.values() for call in server.calls]
        if calls:
            call = self._random.choice(calls)
            self._schedule.trace("%s of %s: connection lost", call.method, call.client)
            call.sever(self._random)

    def _sever_host(self) -> None:
        name, server = self._name("scheduler", "rank"), self._name("server")
        self._schedule.trace("%s: connections with %s lost", name, server)
        self._schedule.sever_hosts(name, server)

    def _cut(self) -> None:
        one, other = self._name("scheduler", "rank"), self._random.choice((self._name("rank"), self._name("server")))
        self._cut_between(one, other)
        network = self._schedule.network
        network.at(network.loop.now_seconds + DEAD_PEER_SECONDS, self._give_up, one, other)

    def _cut_servers(self) -> None:
        """Cuts a path between two servers, or between one and the directory. They have their own time limits."""
        one, other = self._random.sample([*self._schedule.draw.servers, DIRECTORY], 2)
        if self._random.random() < 0.2:
            self._schedule.sever_hosts(one, other)
        else:
            self._cut_between(one, other)

    def _isolate_primary(self) -> None:
        """Cuts the primary off from the other servers and the directory. Clients and ranks still reach it."""
        primary = self._primary_name()
        others = [*(server for server in self._schedule.draw.servers if server != primary), DIRECTORY]
        self._cut_ways([way for other in others for way in _both(primary, other)])

    def _primary_name(self) -> str:
        return self._schedule.primary_name or self._name("server")

    def _cut_between(self, one: str, other: str) -> None:
        self._cut_ways(self._random.choice((_both(one, other), _both(one, other)[:1], _both(one, other)[1:])))

    def _cut_ways(self, ways: Sequence[tuple[str, str]]) -> None:
        network = self._schedule.network
        self._schedule.trace("cut: %s", ways)
        for way in ways:
            network.cut(*way)

        def mend() -> None:
            self._schedule.trace("mended: %s", ways)
            for way in ways:
                network.mend(*way)

        self._for_a_while(mend)

    def _give_up(self, one: str, other: str) -> None:
        if self._schedule.network.is_cut(one, other):
            self._schedule.sever_hosts(one, other)

    def _slow_down(self) -> None:
        network = self._schedule.network
        network.slowness = self._random.choice((10.0, 100.0))
        self._schedule.trace("messages take %g times as long", network.slowness)

        def end() -> None:
            network.slowness = 1.0

        self._for_a_while(end)

    def _stop(self, name: str) -> None:
        process = self._schedule.processes[name]
        self._schedule.trace("%s: stopped", process)
        process.stop()

        def go_on() -> None:
            self._schedule.trace("%s: goes on", process)
            process.go_on()

        self._for_a_while(go_on)

    def _repeat(self) -> None:
        self._schedule.wire.repeats = 0.3

    def _lose(self) -> None:
        wire = self._schedule.wire
        wire.losses = self._random.choice((0.01, 0.1, 0.3))
        self._schedule.trace("connections break with %g of the messages", wire.losses)

        def end() -> None:
            wire.losses = 0.0

        self._for_a_while(end)


def _both(one: str, other: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Both ways between two hosts."""
    return (one, other), (other, one)
