"""Figures that the server counts outside the core: calls, steps and the journal."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvpool.core.ids import PoolName
from kvpool.core.statistics import Histogram


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
REFUSAL_REASONS: Final = (
    *("NO_TOKEN", "UNKNOWN_TOKEN", "TOKEN_EXPIRED", "TOKEN_REVOKED", "TOKEN_CHANGED"),
    *("ROLE", "POOL", "SESSION"),
)
"""Why a call fails authentication or authorization."""
LIMIT_REASONS: Final = (
    *("OUT_OF_MEMORY", "QUOTA_UNAVAILABLE", "MESSAGE_TOO_LARGE", "STEP_TOO_LARGE", "NOT_READING", "NOTHING_SENT"),
    *("TOO_MANY_BLOCKS", "TOO_MANY_POOLS", "TOO_MANY_REQUESTS", "TOO_MANY_SESSIONS", "TOO_MANY_STREAMS"),
    *("TOO_MANY_TOKENS", "TOO_MANY_WAITING", "TOO_MANY_WATCHES"),
    *("TOO_MANY_TOKEN_BLOCKS", "TOO_MANY_TOKEN_CALLS", "TOO_MANY_TOKEN_POOLS", "TOO_MANY_TOKEN_REQUESTS"),
    *("TOO_MANY_TOKEN_SESSIONS", "TOO_MANY_TOKEN_TOKENS"),
)
"""Why a call exceeds a limit. Counters begin with 0, so that the first refusal is an increase."""
OPERATION_BOUNDS: Final = tuple(2**i for i in range(14))


@dataclass(slots=True)
class StepHistograms:
    """Steps of the streams of one pool.

    Attributes:
        seconds: Time from a step's arrival to its encoded result.
        operations: Operations per step.
    """

    seconds: Histogram = field(default_factory=partial(Histogram, STEP_BOUNDS_SECONDS))
    operations: Histogram = field(default_factory=partial(Histogram, OPERATION_BOUNDS))


class Observations:
    """Counts and histograms of one server; its event loop writes and reads them.

    Attributes:
        steps: By pool: its steps.
        rpcs: By method and code: completed calls.
        rpc_seconds: By method: durations of unary calls.
        refusals: By reason: calls that failed authentication or authorization.
        limit_refusals: By reason: calls that exceeded a limit.
    """

    def __init__(self) -> None:
        self.steps: dict[PoolName, StepHistograms] = {}
        self.rpcs: Counter[tuple[str, str]] = Counter()
        self.rpc_seconds: dict[str, Histogram] = {}
        self.refusals: Counter[str] = Counter(dict.fromkeys(REFUSAL_REASONS, 0))
        self.limit_refusals: Counter[str] = Counter(dict.fromkeys(LIMIT_REASONS, 0))

    def step(self, pool: PoolName, num_operations: int, seconds: float) -> None:
        """Counts a step of a stream."""
        steps = self.steps.get(pool)
        if steps is None:
            steps = self.steps[pool] = StepHistograms()
        steps.seconds.observe(seconds)
        steps.operations.observe(num_operations)

    def rpc(self, method: str, code: str, seconds: float | None) -> None:
        """Counts a completed call; `seconds` is None for a stream, whose duration its client decides."""
        self.rpcs[method, code] += 1
        if seconds is not None:
            self.rpc_seconds.setdefault(method, Histogram(STEP_BOUNDS_SECONDS)).observe(seconds)

    def forget_pools_but(self, names: set[PoolName]) -> None:
        """Deletes the histograms of removed pools."""
        for name in self.steps.keys() - names:
            del self.steps[name]

    def copy(self) -> "Observations":
        """Returns an independent copy, without the histograms of pools."""
        made = Observations()
        made.rpcs, made.refusals = self.rpcs.copy(), self.refusals.copy()
        made.limit_refusals = self.limit_refusals.copy()
        made.rpc_seconds = {method: histogram.copy() for method, histogram in self.rpc_seconds.items()}
        return made
