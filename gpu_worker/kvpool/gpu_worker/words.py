"""What a rank hears, says and has to do: the values of its conversation. Frozen."""

from dataclasses import dataclass

from kvpool.core.errors import KvpoolError
from kvpool.core.planning.plan import KVCacheConfig
from kvpool.core.ranks.messages import PoolState, Registration


@dataclass(frozen=True, slots=True)
class Registered:
    """The server knows the rank; see Registered in the proto."""

    heartbeat_seconds: float
    heartbeat_timeout_seconds: float
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Planned:
    """What to allocate for an epoch."""

    epoch: int
    config: KVCacheConfig
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The pool is open; `num_blocks` is the smallest number over all ranks."""

    epoch: int
    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Status:
    """How the pool is; `heartbeat_sequence` 0 if unasked."""

    state: PoolState
    epoch: int
    absent_ranks: tuple[int, ...]
    heartbeat_sequence: int = 0


@dataclass(frozen=True, slots=True)
class FenceSet:
    """Whose steps may run; see Fence in the proto."""

    fence_sequence: int
    epoch: int
    last_session_number: int
    live_session_numbers: tuple[int, ...]


Heard = Registered | Planned | Ready | Status | FenceSet
"""What the server says."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Tensors that a rank got.

    Attributes:
        config: The plan that they were made for.
        num_blocks: Blocks that they have room for: as planned, or fewer.
        allocated_bytes: Memory that they take.
        shapes: For people: layer name, shape and element type of each tensor as its backend sees it.
    """

    config: KVCacheConfig
    num_blocks: int
    allocated_bytes: int
    shapes: tuple[tuple[str, tuple[int, ...], str], ...] = ()

    def fits(self, config: KVCacheConfig) -> bool:
        """Whether another plan can have these tensors: the same buffers and groups, and no more blocks."""
        return config.num_blocks <= self.num_blocks and _layout(config) == _layout(self.config)


@dataclass(frozen=True, slots=True)
class Initialized:
    """The rank has its tensors for a plan."""

    epoch: int
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """No step that a fence keeps out is in flight."""

    fence_sequence: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The rank goes for good."""


Word = Initialized | Heartbeat | Fenced | Leave
"""What a rank says after it has registered."""


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Effect: a new stream begins with this registration."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Effect: the stream is given up; nothing that still comes from it counts."""


@dataclass(frozen=True, slots=True)
class Say:
    """Effect: the server is told."""

    word: Word


@dataclass(frozen=True, slots=True)
class Allocate:
    """Effect: what is held is freed, then this is allocated; `allocated` is called with what came of it."""

    planned: Planned


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """Effect: steps of this epoch may run, once the views are made."""

    ready: Ready


@dataclass(frozen=True, slots=True)
class EpochPassed:
    """Effect: no step of this epoch may run any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class JoinLater:
    """Effect: there is no stream any more; `tick` opens the next one."""

    error: KvpoolError
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Effect: it is over; the caller must mend this."""

    error: Exception


Effect = OpenStream | CloseStream | Say | Allocate | EpochBegan | EpochPassed | JoinLater | Failed


def _layout(config: KVCacheConfig) -> object:
    """What must be equal in two plans for one to have the other's tensors."""
    pages = tuple((tensor.shared_by, tensor.size_bytes // config.num_blocks) for tensor in config.tensors)
    return pages, config.groups
