"""What ranks say of themselves, what they are told, and what is known of them. Frozen values that check themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Final, NewType

from kvpool.core.errors import InvalidArgumentError, KvpoolError, check_range
from kvpool.core.ids import MAX_BLOCKS, MAX_TOKENS, PoolName, SessionNumber
from kvpool.core.planning.plan import KVCacheConfig, Plan, PlanOptions
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import MAX_LAYERS
from kvpool.core.specs.pool_config import HashScheme, PoolConfig, ReuseOrder

Rank = NewType("Rank", int)
"""A rank's number, [0, world_size)."""

LinkId = NewType("LinkId", int)
"""A rank's stream to the server, never used again."""

MAX_WORLD_SIZE: Final = 4096
MAX_EPOCH: Final = 2**53
MAX_AVAILABLE_BYTES: Final = 2**60
_BOOT_ID_LENGTHS: Final = (8, 64)
_TEXT_BYTES: Final = 256


class PoolState(Enum):
    """Whether a pool serves."""

    FORMING = "forming"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"


class RankState(Enum):
    """How a rank is; see RankState in pool.proto."""

    ABSENT = "absent"
    REGISTERED = "registered"
    ALLOCATING = "allocating"
    READY = "ready"
    SILENT = "silent"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RankTiming:
    """How long ranks are waited for.

    Attributes:
        heartbeat_seconds: How often a rank is to be heard of.
        heartbeat_timeout_seconds: After how long without it counts as silent.
        grace_seconds: How long a rank that is silent or lost may come back with nothing lost.
    """

    heartbeat_seconds: float = 1.0
    heartbeat_timeout_seconds: float = 5.0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not 0.01 <= self.heartbeat_seconds <= 3600:  # noqa: PLR2004 - the message states it
            raise ValueError(f"heartbeat_seconds: {self.heartbeat_seconds} is not in [0.01, 3600]")
        if not 2 * self.heartbeat_seconds <= self.heartbeat_timeout_seconds <= 3600:  # noqa: PLR2004 - likewise
            raise ValueError(
                f"heartbeat_timeout_seconds: {self.heartbeat_timeout_seconds} is not in [2 x heartbeat_seconds, 3600]"
            )
        if not 0 <= self.grace_seconds <= 86_400:  # noqa: PLR2004 - likewise
            raise ValueError(f"rank_grace_seconds: {self.grace_seconds} is not in [0, 86400]")


@dataclass(frozen=True, slots=True)
class RankGroupOptions(PlanOptions):
    """Options that are equal on all ranks of a pool: those of the plan, and those of the pool.

    Construction checks nothing, so that the server can name the field of a registration; see `check`.

    Attributes:
        reuse_order: The order in which freed blocks are used again.
        enable_caching: Whether full blocks can be found again by hash.
        use_eagle: Whether the last block of a hit is computed again.
        enable_events: Whether block events are made.
        hash_scheme: How blocks are hashed.
        retention_tokens: Interval at which sliding windows are cached, in tokens; None to cache all of them.
    """

    reuse_order: ReuseOrder = ReuseOrder.UNCACHED_FIRST
    enable_caching: bool = True
    use_eagle: bool = False
    enable_events: bool = False
    hash_scheme: HashScheme = field(default_factory=HashScheme)
    retention_tokens: int | None = None

    def __post_init__(self) -> None:
        pass

    def check(self) -> None:
        """Raises InvalidArgumentError if a number is out of range; names the field."""
        check_range("max_model_len", self.max_model_len, 1, MAX_TOKENS)
        check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_TOKENS)
        check_range("max_num_encoder_input_tokens", self.max_num_encoder_input_tokens, 0, MAX_TOKENS)
        self.hash_scheme.check()
        PlanOptions.__post_init__(self)

    def with_num_blocks(self, num_blocks: int) -> "RankGroupOptions":
        """The same options, with this number of blocks unless it is 0."""
        return replace(self, num_blocks_override=num_blocks) if num_blocks else self

    def pool_config(self, name: PoolName, plan: Plan) -> PoolConfig:
        """The pool that a plan makes."""
        return PoolConfig(
            name=name,
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
            groups=plan.groups,
            reuse_order=self.reuse_order,
            enable_caching=self.enable_caching,
            use_eagle=self.use_eagle,
            dcp_world_size=self.decode_context_parallel_size,
            enable_events=self.enable_events,
            hash_scheme=self.hash_scheme,
            retention_tokens=self.retention_tokens,
        )

    def difference(self, other: "RankGroupOptions") -> str:
        """Names the first field in which two ranks differ; empty if none does."""
        return next((f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)), "")


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """Tensors that a rank holds from before, their contents untouched since.

    Attributes:
        epoch: The epoch in which they were used.
        num_blocks: Blocks they have room for.
    """

    epoch: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Registration:
    """What a rank says of itself.

    Attributes:
        rank: Which rank it is.
        world_size: Ranks of the pool.
        boot_id: Tells the process from a successor.
        options: The same in all ranks.
        layers: Spec of each of its layers, in the model's order.
        available_bytes: Memory that its tensors may take.
        held: What it holds from before; None for nothing.
        device: For people.
        host: For people.
        pid: For people.
        last_epoch: Newest epoch that it was told of, by this server or an earlier one; 0 for none.
        fences: Whether it answers fences.
    """

    rank: Rank
    world_size: int
    boot_id: str
    options: RankGroupOptions
    layers: Mapping[str, KVCacheSpec]
    available_bytes: int
    held: HeldTensors | None = None
    device: str = ""
    host: str = ""
    pid: int = 0
    last_epoch: int = 0
    fences: bool = False

    def check(self) -> None:
        """Raises InvalidArgumentError if something is out of range; names the field."""
        check_range("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        check_range("rank", self.rank, 0, self.world_size - 1)
        low, high = _BOOT_ID_LENGTHS
        if not low <= len(self.boot_id) <= high:
            raise InvalidArgumentError("boot_id", f"needs {low} to {high} characters")
        check_range("layers", len(self.layers), 1, MAX_LAYERS)
        if self.available_bytes <= 0:
            raise InvalidArgumentError("available_bytes", "0: no memory is left for the KV cache", reason="NO_MEMORY")
        check_range("available_bytes", self.available_bytes, 1, MAX_AVAILABLE_BYTES)
        check_range("last_epoch", self.last_epoch, 0, MAX_EPOCH)
        if self.held:
            check_range("held.epoch", self.held.epoch, 1, self.last_epoch)
            check_range("held.num_blocks", self.held.num_blocks, 2, MAX_BLOCKS)
        for name in ("device", "host"):
            if len(getattr(self, name).encode("utf-8", "surrogatepass")) > _TEXT_BYTES:
                raise InvalidArgumentError(name, f"longer than {_TEXT_BYTES} bytes")
        try:
            self.options.check()
        except InvalidArgumentError as error:
            error.rename_field(f"options.{error.field.removeprefix('config.')}")
            raise


@dataclass(frozen=True, slots=True)
class Allocated:
    """What a rank got.

    Attributes:
        epoch: The plan's.
        num_blocks: Blocks that its tensors have room for.
        allocated_bytes: Memory that they take.
    """

    epoch: int
    num_blocks: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of a pool as another process of the server must know them to take them back.

    Attributes:
        epoch: The pool's.
        options: What they all said.
        plan: Of this epoch; None if the pool is not open in it.
        members: What each rank said and got, in their order; none if the pool is not open.
    """

    epoch: int
    options: RankGroupOptions
    plan: Plan | None = None
    members: tuple[tuple[Registration, Allocated], ...] = ()


@dataclass(frozen=True, slots=True)
class RankInfo:
    """How a rank is at one moment; see RankInfo in pool.proto."""

    rank: Rank
    state: RankState
    device: str = ""
    host: str = ""
    pid: int = 0
    available_bytes: int = 0
    allocated_bytes: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Registered:
    """The server has accepted a rank; see Registered in worker.proto.

    Attributes:
        heartbeat_seconds: Interval at which the rank sends heartbeats.
        heartbeat_timeout_seconds: Time without a message after which either side gives up the stream.
        grace_seconds: Time in which an absent rank can come back with nothing lost.
    """

    heartbeat_seconds: float
    heartbeat_timeout_seconds: float
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Planned:
    """The tensors that a rank allocates for an epoch."""

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
class PoolStatus:
    """The state of the pool; `heartbeat_sequence` is 0 unless it answers a heartbeat."""

    state: PoolState
    epoch: int
    absent_ranks: tuple[int, ...]
    heartbeat_sequence: int = 0


@dataclass(frozen=True, slots=True)
class FenceSet:
    """The sessions whose steps may run; see Fence in worker.proto."""

    fence_sequence: int
    epoch: int
    last_session_number: int
    live_session_numbers: tuple[int, ...]


ServerMessage = Registered | Planned | Ready | PoolStatus | FenceSet
"""A message of the server to a rank."""


@dataclass(frozen=True, slots=True)
class MessageSent:
    """Effect: a message is sent to a rank."""

    link: LinkId
    message: ServerMessage


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """Effect: a rank's stream ends with an error."""

    link: LinkId
    error: KvpoolError


@dataclass(frozen=True, slots=True)
class PoolOpened:
    """Effect: the pool opens in a new epoch, with nothing in it; `ranks_fence` if every rank answers fences."""

    config: PoolConfig
    epoch: int
    ranks_fence: bool


@dataclass(frozen=True, slots=True)
class PoolSuspended:
    """Effect: nothing is allocated for now; blocks and sessions stay as they are."""


@dataclass(frozen=True, slots=True)
class PoolResumed:
    """Effect: the pool goes on as if nothing had been."""


@dataclass(frozen=True, slots=True)
class EpochPassed:
    """Effect: what blocks held is gone; sessions end."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SessionsFenced:
    """Effect: no step under these numbers of sessions, which have ended, is in flight on any rank, or will be."""

    numbers: tuple[SessionNumber, ...]


RankEffect = MessageSent | LinkEnded
"""What is done to one rank's stream."""

PoolEffect = PoolOpened | PoolSuspended | PoolResumed | EpochPassed | SessionsFenced
"""What is done to the pool."""

Effect = RankEffect | PoolEffect
"""What a change of membership asks its host to do, in order."""
