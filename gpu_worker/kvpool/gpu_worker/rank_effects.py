"""Messages that a rank sends and effects that its protocol returns. Frozen values.

Messages that a rank receives are those of `kvpool.core.ranks.messages.ServerMessage`.
"""

from dataclasses import dataclass, replace

from kvpool.core.errors import KvpoolError
from kvpool.core.ids import SessionNumber
from kvpool.core.planning.plan import KVCacheConfig
from kvpool.core.ranks.messages import MappingProcess, Planned, Ready, Registration


@dataclass(frozen=True, slots=True)
class Allocation:
    """The tensors that a rank has allocated.

    Attributes:
        config: The plan that they were allocated for.
        num_blocks: Number of blocks that they hold: as planned, or fewer.
        allocated_bytes: Memory that they take.
        shapes: Layer name, shape and element type of each tensor as its backend sees it; for display.
    """

    config: KVCacheConfig
    num_blocks: int
    allocated_bytes: int
    shapes: tuple[tuple[str, tuple[int, ...], str], ...] = ()

    def fits(self, config: KVCacheConfig) -> bool:
        """Whether a plan can use these tensors: it has the same buffers and groups, and no more blocks."""
        return config.num_blocks <= self.num_blocks and _layout(config) == _layout(self.config)

    def config_for(self, num_blocks: int) -> KVCacheConfig:
        """The plan for the first blocks."""
        tensors = tuple(
            replace(tensor, size_bytes=tensor.size_bytes // self.config.num_blocks * num_blocks)
            for tensor in self.config.tensors
        )
        return replace(self.config, num_blocks=num_blocks, tensors=tensors)


def _layout(config: KVCacheConfig) -> object:
    """The part of a plan that must be equal for it to use the tensors of another plan."""
    blocks = tuple(
        (tensor.shared_by, tensor.offsets_bytes, tensor.size_bytes // config.num_blocks) for tensor in config.tensors
    )
    return blocks, config.groups


@dataclass(frozen=True, slots=True)
class Initialized:
    """The rank has allocated the tensors of a plan."""

    epoch: int
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The rank is alive, and these processes may map its memory."""

    sequence: int
    mapping_processes: tuple[MappingProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class Fenced:
    """The fence is enforced. Only of the pending sessions, steps that it excludes may be in flight."""

    fence_sequence: int
    pending: tuple[SessionNumber, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionsGone:
    """Processes of these sessions have exited."""

    session_numbers: tuple[SessionNumber, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """The rank leaves the pool and does not come back."""


WorkerMessage = Initialized | Heartbeat | Fenced | SessionsGone | Leave
"""A message of a rank to the server, after the registration."""


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Effect: open a new stream with this registration."""

    registration: Registration


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send a message to the server."""

    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class Allocate:
    """Effect: free the tensors that are held, allocate those of the plan, then call `RankProtocol.allocated`."""

    planned: Planned


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """Effect: make the views, then admit steps of this epoch."""

    ready: Ready


@dataclass(frozen=True, slots=True)
class EpochPassed:
    """Effect: steps of this epoch must not run any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class JoinLater:
    """Effect: close the stream and ignore its later messages; `tick` opens the next one after the pause."""

    error: KvpoolError
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Effect: the rank has ended with an error that the caller must resolve."""

    error: Exception


Effect = OpenStream | Send | Allocate | EpochBegan | EpochPassed | JoinLater | Failed
