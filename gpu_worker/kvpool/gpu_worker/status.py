"""State of a rank at one moment, for runners, metrics and health checks. Does not import torch."""

from dataclasses import dataclass
from typing import Final

from kvpool.core.ranks.messages import PoolState
from kvpool.gpu_worker.rank_protocol import Phase

_MAX_LISTED_RANKS: Final = 8


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """State of a rank at one moment.

    Attributes:
        phase: The phase of the rank.
        epoch: The epoch whose steps may run; 0 for none.
        num_blocks: Number of blocks of the pool in that epoch; 0 for none.
        pool_state: State of the pool as the server last reported it; None before that.
        absent_ranks: Ranks that were absent then, at most the first 64.
    """

    phase: Phase
    epoch: int = 0
    num_blocks: int = 0
    pool_state: PoolState | None = None
    absent_ranks: tuple[int, ...] = ()

    @property
    def is_serving(self) -> bool:
        """Whether the rank is part of a ready pool, as last reported. The server may have stopped since."""
        return self.phase is Phase.READY and bool(self.epoch) and self.pool_state is PoolState.READY

    def describe(self) -> str:
        """Describes the phase of the rank and the absent ranks in words."""
        listed = [str(rank) for rank in self.absent_ranks[:_MAX_LISTED_RANKS]]
        if len(self.absent_ranks) > _MAX_LISTED_RANKS:
            listed.append("...")
        return f"the rank is {self.phase.value}" + (f", absent ranks: {', '.join(listed)}" if listed else "")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device.

    Attributes:
        total_bytes: Size of the memory.
        free_bytes: Memory that no process uses now.
    """

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """Memory, stream and step counts of a rank.

    Attributes:
        available_bytes: Memory that its tensors may take, as reported to the server.
        allocated_bytes: Memory that its tensors take now.
        joins: Number of streams on which the server accepted the rank.
        heartbeats: Number of heartbeats that the server answered, on all streams.
        last_heartbeat_seconds: Time of the last answered heartbeat, in seconds since 1970; None before the first.
        steps_in_flight: Number of admitted steps that are not done; for a rank that lends its memory, of ended sessions
            whose processes have not answered.
        mapping_processes: Number of processes that may map the memory, of a rank that lends it.
        host_bytes: Host memory of its evicted blocks, of such a rank.
    """

    available_bytes: int
    allocated_bytes: int = 0
    joins: int = 0
    heartbeats: int = 0
    last_heartbeat_seconds: float | None = None
    steps_in_flight: int = 0
    mapping_processes: int = 0
    host_bytes: int = 0
