"""Figures that the server counts outside the core: calls, steps, publishers and the journal."""

from dataclasses import dataclass
from typing import Final

from kvpool.core.ids import PoolName
from kvpool.core.statistics import Histogram


@dataclass(frozen=True, slots=True)
class PublisherCounts:
    """Counts of the ZeroMQ publisher of one pool.

    Attributes:
        messages: Messages published, heartbeats included.
        skipped_batches: Batches not published because the publisher fell behind. It published all cached blocks again.
        replays: Replays served.
        snapshots: Snapshots served.
    """

    messages: int
    skipped_batches: int
    replays: int
    snapshots: int


@dataclass(slots=True)
class JournalCounts:
    """Counts and times of a server's journal.

    Attributes:
        is_up: Whether a server killed now would recover its state.
        size_bytes: Size of the journal's files.
        records: Changes written.
        snapshots: Snapshots completed.
        snapshot_seconds: Time from the newest snapshot's moment until it was complete.
        stopped_seconds: Part of that time in which the server did nothing else.
        failures: Number of times that the journal was given up.
        recovery_seconds: Time to read the journal when the server started.
    """

    is_up: bool = False
    size_bytes: int = 0
    records: int = 0
    snapshots: int = 0
    snapshot_seconds: float = 0.0
    stopped_seconds: float = 0.0
    failures: int = 0
    recovery_seconds: float = 0.0


STEP_BOUNDS_SECONDS: Final = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
OPERATION_BOUNDS: Final = tuple(2**i for i in range(14))


class Observations:
    """Counts and histograms of one server; its event loop writes and reads them.

    Attributes:
        step_seconds: By pool: time from a step's arrival to its encoded result.
        step_operations: By pool: operations per step.
        rpcs: By method and code: completed calls.
        rpc_seconds: By method: durations of unary calls.
        refusals: By reason: calls that failed authentication or authorization.
    """

    def __init__(self) -> None:
        self.step_seconds: dict[PoolName, Histogram] = {}
        self.step_operations: dict[PoolName, Histogram] = {}
        self.rpcs: dict[tuple[str, str], int] = {}
        self.rpc_seconds: dict[str, Histogram] = {}
        self.refusals: dict[str, int] = {}

    def step(self, pool: PoolName, num_operations: int, seconds: float) -> None:
        """Counts a step of a stream."""
        timed = self.step_seconds.get(pool)
        if timed is None:
            timed = self.step_seconds[pool] = Histogram(STEP_BOUNDS_SECONDS)
            self.step_operations[pool] = Histogram(OPERATION_BOUNDS)
        timed.observe(seconds)
        self.step_operations[pool].observe(num_operations)

    def rpc(self, method: str, code: str, seconds: float | None) -> None:
        """Counts a completed call; `seconds` is None for a stream, whose duration its client decides."""
        self.rpcs[method, code] = self.rpcs.get((method, code), 0) + 1
        if seconds is not None:
            self.rpc_seconds.setdefault(method, Histogram(STEP_BOUNDS_SECONDS)).observe(seconds)

    def refusal(self, reason: str) -> None:
        """Counts a call that failed authentication or authorization."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def forget_pools_but(self, names: set[PoolName]) -> None:
        """Deletes the histograms of removed pools."""
        for name in self.step_seconds.keys() - names:
            del self.step_seconds[name], self.step_operations[name]
