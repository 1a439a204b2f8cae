"""How a rank is at one moment, for runners, metrics and health. Needs no torch."""

from dataclasses import dataclass
from typing import Final

from kvpool.core.ranks.messages import PoolState
from kvpool.gpu_worker.join import Phase

_TOLD_RANKS: Final = 8


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A rank at one moment.

    Attributes:
        phase: Where the rank stands.
        epoch: Whose steps may run; 0 if none may.
        num_blocks: Blocks of the pool in that epoch; 0 if there is none.
        pool_state: How the pool was when the server last said so; None before that.
        absent_ranks: Ranks that were not there then, the first 64.
    """

    phase: Phase
    epoch: int = 0
    num_blocks: int = 0
    pool_state: PoolState | None = None
    absent_ranks: tuple[int, ...] = ()

    @property
    def is_serving(self) -> bool:
        """Whether the rank takes part in a pool that serves, as far as it knows: its server may be gone since."""
        return self.phase is Phase.READY and bool(self.epoch) and self.pool_state is PoolState.READY

    def describe(self) -> str:
        """Says for people where the rank stands, and who is waited for."""
        told = [str(rank) for rank in self.absent_ranks[:_TOLD_RANKS]]
        if len(self.absent_ranks) > _TOLD_RANKS:
            told.append("...")
        return f"the rank is {self.phase.value}" + (f", absent ranks: {', '.join(told)}" if told else "")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory.

    Attributes:
        total_bytes: What there is.
        free_bytes: What nobody uses now.
    """

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """What a rank holds, and how its conversation with the server goes.

    Attributes:
        available_bytes: Memory that its tensors may take, as it told the server.
        allocated_bytes: Memory that they take now.
        joins: Streams that the server took it in on.
        heartbeats: Heartbeats that the server answered, on all of them.
        last_heartbeat_seconds: When it answered the last, in seconds since 1970; None before the first.
        steps_in_flight: Steps that were let through and are not done.
    """

    available_bytes: int
    allocated_bytes: int = 0
    joins: int = 0
    heartbeats: int = 0
    last_heartbeat_seconds: float | None = None
    steps_in_flight: int = 0
