"""What only the service sees of its calls and steps: how long they took, and how they ended."""

from dataclasses import dataclass
from typing import Final

from kvpool.core.ids import PoolName
from kvpool.core.statistics import Histogram


@dataclass(frozen=True, slots=True)
class PublisherCounts:
    """What the ZeroMQ publisher of a pool's events did.

    Attributes:
        messages: Messages published, heartbeats included.
        skipped_batches: Batches that were not published, as it fell behind; the map was told anew instead.
        replays: Replays served.
        snapshots: Snapshots served.
    """

    messages: int
    skipped_batches: int
    replays: int
    snapshots: int


STEP_BOUNDS_SECONDS: Final = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
OPERATION_BOUNDS: Final = tuple(2**i for i in range(14))


class Observations:
    """Counts and histograms of one server; its event loop writes and reads them.

    Attributes:
        step_seconds: By pool, time from a step's arrival to its encoded result.
        step_operations: By pool, operations of a step.
        rpcs: By method and code, calls that ended.
        rpc_seconds: By method, how long unary calls took.
        refusals: By reason, calls that were not let in.
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
        """Counts a call that ended; `seconds` None for a stream, which lasts as long as its client likes."""
        self.rpcs[method, code] = self.rpcs.get((method, code), 0) + 1
        if seconds is not None:
            self.rpc_seconds.setdefault(method, Histogram(STEP_BOUNDS_SECONDS)).observe(seconds)

    def refusal(self, reason: str) -> None:
        """Counts a call that was not let in."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def forget_pools_but(self, names: set[PoolName]) -> None:
        """Lets go of the pools that are no more."""
        for name in self.step_seconds.keys() - names:
            del self.step_seconds[name], self.step_operations[name]
