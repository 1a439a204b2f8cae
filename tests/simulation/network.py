"""A network between simulated processes: messages take time, wait while a path is cut, and are lost with a connection.

1. Messages of one `Pipe` arrive in order, or not at all from some point on. Messages of two pipes arrive in any order.
2. A cut path (one direction between two hosts) keeps messages until it is restored, as TCP does. A message that waits
   too long is lost with its connection. Each end notices this at its own time.
3. Nothing is delivered to a dead process. A stopped process gets its messages when it continues.
"""

from collections.abc import Callable
from random import Random

from simulation.virtual_loop import VirtualLoop

Deliver = Callable[[], None]


class Pipe:
    """One direction of one connection.

    Attributes:
        sender: The sending host.
        receiver: The receiving host.
        is_closed: Whether messages sent from now on are lost.
        is_broken: Whether messages in transit are lost, too.
    """

    __slots__ = ("_arrival_seconds", "_network", "is_broken", "is_closed", "receiver", "sender")

    def __init__(self, network: "Network", sender: str, receiver: str) -> None:
        self._network = network
        self.sender = sender
        self.receiver = receiver
        self.is_closed = False
        self.is_broken = False
        self._arrival_seconds = 0.0

    def send(self, deliver: Deliver) -> None:
        """Delivers a message after all earlier ones."""
        if self.is_closed or self.is_broken:
            return
        self.pass_on(deliver)

    def pass_on(self, deliver: Deliver) -> None:
        """Starts the transit of a message."""
        waiting = self._network.cut_ways.get((self.sender, self.receiver))
        if waiting is not None:
            waiting.append((self, deliver))
            return
        network = self._network
        arrival_seconds = network.loop.now_seconds + network.delay_seconds()
        self._arrival_seconds = max(self._arrival_seconds, arrival_seconds)
        network.at(self._arrival_seconds, self._arrive, deliver)

    def _arrive(self, deliver: Deliver) -> None:
        if not self.is_broken:
            deliver()


class Network:
    """All paths between hosts.

    Attributes:
        loop: The loop with the virtual time.
        cut_ways: The cut paths (sender, receiver), and their waiting messages.
        slowness: Factor by which messages take longer than usual.
    """

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.cut_ways: dict[tuple[str, str], list[tuple[Pipe, Deliver]]] = {}
        self.slowness = 1.0
        self._random = random

    def delay_seconds(self) -> float:
        """Draws the transit time of a message: mostly short, sometimes very long."""
        drawn = self._random.random()
        short_seconds = 0.0001 + 0.002 * drawn
        return short_seconds * self.slowness if drawn < 0.97 else 0.3 * self._random.random()

    def at(self, when_seconds: float, callback: Callable[..., None], *args: object) -> None:
        """Calls back at a time, outside any process, which may be stopped or dead by then."""
        self.loop.call_outside(when_seconds, callback, *args)

    def soon(self, callback: Callable[..., None], *args: object) -> None:
        """Calls back after the transit time of a message."""
        self.at(self.loop.now_seconds + self.delay_seconds(), callback, *args)

    def cut(self, sender: str, receiver: str) -> None:
        """Cuts a path."""
        self.cut_ways.setdefault((sender, receiver), [])

    def mend(self, sender: str, receiver: str) -> None:
        """Restores a path, and delivers waiting messages."""
        for pipe, deliver in self.cut_ways.pop((sender, receiver), ()):
            pipe.pass_on(deliver)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether a path between two hosts is cut in either direction."""
        return (one, other) in self.cut_ways or (other, one) in self.cut_ways
