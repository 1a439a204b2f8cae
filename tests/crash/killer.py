"""Kills and restarts processes of a run at random instants. The seed determines its actions."""

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from crash.site import DEAD_PEER_SECONDS, Site
from support.faults import POINTS

_MARGIN_SECONDS: Final = 1.0
_FAULT_SECONDS: Final = 4.0
"""Time that a server has to reach the fault point at which it dies."""


class Killer:
    """Kills and stops processes of a site, one at a time.

    Attributes:
        rank_stops_seconds: How long ranks are stopped.
    """

    rank_stops_seconds: tuple[float, ...] = (2.5, 7.0)

    def __init__(self, site: Site) -> None:
        self._site = site
        self._chance = random.Random(site.plan.seed)  # noqa: S311 - a test's dice
        journaled = site.plan.journaled
        self._points = [p for p in sorted(POINTS) if journaled or not p.startswith(("journal.", "snapshot."))]
        self._stopped: list[tuple[float, int]] = []
        self._acts: list[tuple[Callable[[], None], int]] = [
            *self._server_acts(),
            (self._kill_any_scheduler, 10),
            (self._stop_scheduler, 3),
        ]
        if site.plan.ranks:
            self._acts += [(self._kill_rank, 2), (self._stop_rank, 1)]
        if site.plan.lends:
            self._acts += [(self._kill_lender, 3), (self._stop_lender, 1)]

    def run(self, kills: int, on_kill: Callable[[int], object] = lambda _: None) -> None:
        """Kills `kills` times, then continues all stopped processes."""
        acts, weights = zip(*self._acts, strict=True)
        for i in range(kills):
            (act,) = self._chance.choices(acts, weights)
            time.sleep(self._chance.uniform(0.05, 0.5))
            act()
            self._continue_due(time.monotonic())
            on_kill(i + 1)
        for due, _ in self._stopped:
            time.sleep(max(due - time.monotonic(), 0.0))
        self._continue_due(float("inf"))

    def _server_acts(self) -> list[tuple[Callable[[], None], int]]:
        """What is done to servers, with weights."""
        return [(self._kill_server, 6), (self._kill_server_at_a_point, 6), (self._stop_server, 1)]

    @property
    def _slots(self) -> list[int]:
        stopped = {slot for _, slot in self._stopped}
        return [slot for slot in range(self._site.plan.schedulers) if slot not in stopped]

    def _kill_server(self) -> None:
        self._site.log.write("kill", target="server", how="SIGKILL")
        self._site.signal_server(signal.SIGKILL)
        self._restart_server()

    def _kill_server_at_a_point(self) -> None:
        """Replaces the server by one that dies at a fault point, waits for its death, and restarts it."""
        point = self._chance.choice(self._points)
        often = point.startswith(("step.", "journal."))
        count = int(self._chance.expovariate(1 / 60)) + 1 if often else 1
        self._site.log.write("kill", target="server", how="SIGKILL")
        self._site.signal_server(signal.SIGKILL)
        listened = self._site.start_server(f"{point}:kill:{count}")
        server = self._site.server
        assert server
        if listened and point == "lease.expired":
            slot = self._chance.choice(self._slots)
            self._site.wait_for_steps([slot], every=True, unless=lambda: not server.is_alive)
            self._kill_scheduler(slot)
        due = time.monotonic() + _FAULT_SECONDS
        while listened and server.is_alive and time.monotonic() < due:
            time.sleep(0.005)
        died = not server.is_alive
        self._site.log.write("kill", target="server", how=f"at {point}" if died else "SIGKILL")
        server.kill()
        self._restart_server()

    def _restart_server(self) -> None:
        self._site.start_server()
        self._site.wait_for_steps(self._slots, every=False)

    def _stop_server(self) -> None:
        """Stops the server for longer than any lease, which extends the leases."""
        self._stop_for(self._site.plan.lease_seconds + _MARGIN_SECONDS, self._site.signal_server, target="server")
        self._site.wait_for_steps(self._slots, every=False)

    def _kill_any_scheduler(self) -> None:
        self._kill_scheduler(self._chance.choice(self._slots))

    def _kill_scheduler(self, slot: int) -> None:
        self._site.log.write("kill", target="scheduler", how="SIGKILL", name=f"scheduler-{slot}")
        self._site.signal_scheduler(slot, signal.SIGKILL)
        self._site.start_scheduler(slot)

    def _stop_scheduler(self) -> None:
        """Stops a scheduler until its stream counts as broken and its lease has expired after that."""
        if len(self._slots) <= self._site.plan.schedulers // 2:
            return
        slot = self._chance.choice(self._slots)
        self._site.log.write("stop", target="scheduler", how="SIGSTOP", name=f"scheduler-{slot}")
        self._site.signal_scheduler(slot, signal.SIGSTOP)
        seconds = DEAD_PEER_SECONDS + self._site.plan.lease_seconds + _MARGIN_SECONDS
        self._stopped.append((time.monotonic() + seconds, slot))

    def _kill_rank(self) -> None:
        rank = self._chance.randrange(self._site.plan.ranks)
        self._site.log.write("kill", target="rank", how="SIGKILL", rank=rank)
        self._site.signal_rank(rank, signal.SIGKILL)
        self._site.start_rank(rank)

    def _stop_rank(self) -> None:
        """Stops a rank until it counts as silent, sometimes until its epoch passes."""
        rank = self._chance.randrange(self._site.plan.ranks)
        seconds = self._chance.choice(self.rank_stops_seconds)
        self._stop_for(seconds, partial(self._site.signal_rank, rank), target="rank", rank=rank)

    def _kill_lender(self) -> None:
        """Kills the worker that lends memory. Its successor continues, sometimes after its rank was given up."""
        self._site.log.write("kill", target="lender", how="SIGKILL")
        self._site.signal_lender(signal.SIGKILL)
        time.sleep(self._chance.choice([0.0, 0.0, 7.0]))
        self._site.start_lender()

    def _stop_lender(self) -> None:
        """Stops the worker that lends memory until its rank counts as silent, sometimes until its epoch passes."""
        self._stop_for(self._chance.choice([2.5, 7.0]), self._site.signal_lender, target="lender")

    def _stop_for(self, seconds: float, send: Callable[[signal.Signals], object], **target: object) -> None:
        """Stops a process for some time."""
        self._site.log.write("stop", how="SIGSTOP", **target)
        send(signal.SIGSTOP)
        time.sleep(seconds)
        send(signal.SIGCONT)
        self._site.log.write("cont", **target)

    def _continue_due(self, now: float) -> None:
        for due, slot in list(self._stopped):
            if due <= now:
                self._site.signal_scheduler(slot, signal.SIGCONT)
                self._site.log.write("cont", target="scheduler", name=f"scheduler-{slot}")
                self._stopped.remove((due, slot))
