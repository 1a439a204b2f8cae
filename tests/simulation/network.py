"""A network between simulated processes: messages take time, wait while a way is cut, and die with a connection.

1. Messages of one `Pipe` arrive in order, or not at all from some point on; those of two pipes in any order.
2. A way that is cut (one direction between two hosts) keeps what is sent until it is mended, as TCP does. What waits
   for too long dies with its connection: each end is told on its own, and at a time of its own.
3. Nothing is delivered to a process that is dead; one that is stopped gets it when it goes on.
"""

from collections.abc import Callable
from random import Random

from simulation.virtual_loop import VirtualLoop

Deliver = Callable[[], None]


class Pipe:
    """One direction of one connection.

    Attributes:
        sender: The host that sends.
        receiver: The host that gets it.
        is_closed: Whether what is sent from now on is lost.
        is_broken: Whether what is on its way is lost, too.
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
        """Has something delivered after all that was sent before."""
        if self.is_closed or self.is_broken:
            return
        self.pass_on(deliver)

    def pass_on(self, deliver: Deliver) -> None:
        """Puts something on its way that was sent."""
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
    """All ways between hosts.

    Attributes:
        loop: Whose time it is.
        cut_ways: From and to whom nothing arrives at the moment, and what waits.
        slowness: How much longer than usual messages take.
    """

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.cut_ways: dict[tuple[str, str], list[tuple[Pipe, Deliver]]] = {}
        self.slowness = 1.0
        self._random = random

    def delay_seconds(self) -> float:
        """Draws how long a message is on its way: mostly short, now and then very long."""
        drawn = self._random.random()
        short_seconds = 0.0001 + 0.002 * drawn
        return short_seconds * self.slowness if drawn < 0.97 else 0.3 * self._random.random()

    def at(self, when_seconds: float, callback: Callable[..., None], *args: object) -> None:
        """Calls back at a time, in no process; a process can be stopped or dead by then."""
        self.loop.call_outside(when_seconds, callback, *args)

    def soon(self, callback: Callable[..., None], *args: object) -> None:
        """Calls back after a message's time."""
        self.at(self.loop.now_seconds + self.delay_seconds(), callback, *args)

    def cut(self, sender: str, receiver: str) -> None:
        """Cuts a way."""
        self.cut_ways.setdefault((sender, receiver), [])

    def mend(self, sender: str, receiver: str) -> None:
        """Lets what waits go on, and all that is sent from now on."""
        for pipe, deliver in self.cut_ways.pop((sender, receiver), ()):
            pipe.pass_on(deliver)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether one of the ways between two hosts is cut."""
        return (one, other) in self.cut_ways or (other, one) in self.cut_ways
