"""Values exchanged with the ranks of a pool: registrations, options, rank information, effects. All are frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Final, NewType

from kvpool.core.errors import InvalidArgumentError, check_range, check_setting, check_size, fields_renamed, size_bytes
from kvpool.core.ids import MAX_BLOCKS, PoolName
from kvpool.core.planning.plan import KVCacheConfig, Plan, PlanOptions
from kvpool.core.specs.base import QUOTED_CHARACTERS, KVCacheSpec, MambaCacheMode
from kvpool.core.specs.kinds import MAX_LAYERS, UniformTypeKVCacheSpecs
from kvpool.core.specs.pool_config import HashScheme, PoolConfig, ReuseOrder

Rank = NewType("Rank", int)
"""Number of a rank, [0, world_size)."""

LinkId = NewType("LinkId", int)
"""Number of a rank's stream to the server. Never reused."""

MAX_WORLD_SIZE: Final = 4096
MAX_EPOCH_LEAD: Final = 2**32
"""Maximum by which the newest epoch of a rank may exceed those that the server knows: epochs that an earlier server of
the pool opened.

The ranks of a pool may come from a shard that was removed. Each term of a shard has 2^20 epochs, so the lead is 4,096
terms; or 136 years, where epochs start at the time in seconds. The maximum bounds the epochs that one registration uses
up: it takes 2 million malicious ones to exceed 2^53, the documented range.
"""
MAX_AVAILABLE_BYTES: Final = 2**60
MAX_MAPPING_PROCESSES: Final = 64
"""Maximum number of processes that a rank names."""
MAX_NAMED_SESSIONS: Final = 4096
"""Maximum number of sessions in one report of exited processes, and in one answer to a fence."""
_BOOT_ID_LENGTHS: Final = (8, 64)
_TEXT_BYTES: Final = 256
_FINGERPRINT_ENTRIES: Final = 64
_RANK_ENTRY: Final = "rank_"
"""How the names of fingerprint entries begin that describe a rank, such as a stage of a pipeline."""
_FINGERPRINT_NAME_BYTES: Final = 64
_FINGERPRINT_VALUE_BYTES: Final = 1024


class PoolState(Enum):
    """State of a pool; only a pool that is READY allocates and accepts sessions."""

    FORMING = "forming"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"


class RankState(Enum):
    """State of a rank; see RankState in pool.proto."""

    ABSENT = "absent"
    REGISTERED = "registered"
    ALLOCATING = "allocating"
    READY = "ready"
    SILENT = "silent"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RankTiming:
    """Heartbeat interval and timeouts of ranks.

    Attributes:
        heartbeat_seconds: Interval between the heartbeats of a rank.
        heartbeat_timeout_seconds: Time without a heartbeat after which a rank is silent.
        grace_seconds: Time in which a silent or lost rank can return without loss of its contents.
    """

    heartbeat_seconds: float = 1.0
    heartbeat_timeout_seconds: float = 5.0
    grace_seconds: float = 120.0

    def __post_init__(self) -> None:
        check_setting("heartbeat_seconds", self.heartbeat_seconds, 0.01, 3600)
        if not 2 * self.heartbeat_seconds <= self.heartbeat_timeout_seconds <= 3600:  # noqa: PLR2004 - the message states it
            raise ValueError(
                f"heartbeat_timeout_seconds: {self.heartbeat_timeout_seconds} is not in [2 x heartbeat_seconds, 3600]"
            )
        check_setting("rank_grace_seconds", self.grace_seconds, 0, 86_400)


@dataclass(frozen=True, slots=True)
class RankGroupOptions(PlanOptions):
    """The options that all ranks of a pool must agree on: how to plan the memory, and how the pool behaves.

    Attributes:
        reuse_order: The order in which freed blocks are reused.
        enable_caching: Whether full blocks can be found by hash.
        use_eagle: Whether the last block of a hit is computed again.
        enable_events: Whether the pool makes block events.
        hash_scheme: How blocks are hashed.
        retention_tokens: How sparsely sliding windows are cached; None to cache all of their blocks.
    """

    reuse_order: ReuseOrder = ReuseOrder.UNCACHED_FIRST
    enable_caching: bool = True
    use_eagle: bool = False
    enable_events: bool = False
    hash_scheme: HashScheme = field(default_factory=HashScheme)
    retention_tokens: int | None = None

    def check(self) -> None:
        """Raises InvalidArgumentError if a number is out of range; names the field."""
        PlanOptions.check(self)  # super() does not work in a dataclass with slots
        check_range("prefill_context_parallel_size", self.prefill_context_parallel_size, 1, 1)
        if self.mamba_cache_mode is not MambaCacheMode.ALL:
            raise InvalidArgumentError("mamba_cache_mode", "pools of ranks keep the states of all blocks of a step")
        self.hash_scheme.check()

    def pool_config(self, name: PoolName, plan: Plan) -> PoolConfig:
        """Returns the configuration of the pool that a plan describes."""
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
        """Returns the name of the first field that differs; empty if the options are equal."""
        return next((f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)), "")


@dataclass(frozen=True, slots=True)
class DeclaredMemory:
    """The memory of one rank as an engine lays it out; see DeclaredMemory in worker.proto.

    Attributes:
        config: Configuration of the pool; its groups name the layers of this rank only.
        size_bytes: Memory of all blocks on this rank, in bytes: a multiple of their number.
        fingerprint: What the contents depend on: pairs of a name and a value, sorted by name. Entries whose names begin
            with "rank_" may differ between ranks.
    """

    config: PoolConfig
    size_bytes: int
    fingerprint: tuple[tuple[str, str], ...] = ()

    @property
    def block_bytes(self) -> int:
        """Memory of a block on this rank, in bytes."""
        return self.size_bytes // self.config.num_blocks

    @property
    def common_fingerprint(self) -> dict[str, str]:
        """The entries that are equal in all ranks of a pool."""
        return {name: value for name, value in self.fingerprint if not name.startswith(_RANK_ENTRY)}

    @property
    def options(self) -> RankGroupOptions:
        """The options of a registration with this memory. Nothing is planned, so only the maximum length applies."""
        return RankGroupOptions(self.config.max_model_len)

    @property
    def layers(self) -> dict[str, KVCacheSpec]:
        """The layers of a registration with this memory. A layer that its group's spec lacks gets the whole spec."""
        found: dict[str, KVCacheSpec] = {}
        for group in self.config.groups:
            own = dict(group.spec.layers) if isinstance(group.spec, UniformTypeKVCacheSpecs) else {}
            found.update((name, own.get(name, group.spec)) for name in group.layer_names)
        return found

    def check(self) -> None:
        """Raises InvalidArgumentError if a value is out of range; names the field."""
        self.config.check()
        if self.config.num_host_blocks:
            raise InvalidArgumentError("config.num_host_blocks", "must be 0: the lenders state it (--host-memory)")
        if not self.layers:
            raise InvalidArgumentError("config.groups", "name no layer of this rank")
        check_range("size_bytes", self.size_bytes, 1, MAX_AVAILABLE_BYTES)
        if self.size_bytes % self.config.num_blocks:
            message = f"{self.size_bytes} is not a multiple of config.num_blocks, {self.config.num_blocks}"
            raise InvalidArgumentError("size_bytes", message)
        self._check_fingerprint()

    def _check_fingerprint(self) -> None:
        check_range("fingerprint", len(self.fingerprint), 0, _FINGERPRINT_ENTRIES)
        names = [name for name, _ in self.fingerprint]
        if names != sorted(set(names)):
            raise InvalidArgumentError("fingerprint", "names are not sorted, or occur twice")
        for name, value in self.fingerprint:
            where = f'fingerprint["{name[:QUOTED_CHARACTERS]}"]'
            if not 1 <= size_bytes(name) <= _FINGERPRINT_NAME_BYTES:
                raise InvalidArgumentError(where, f"the name needs 1 to {_FINGERPRINT_NAME_BYTES} bytes")
            check_size(where, value, _FINGERPRINT_VALUE_BYTES)


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """Tensors that a rank kept from an earlier stream, with unchanged contents.

    Attributes:
        epoch: The epoch in which the tensors were used.
        num_blocks: Number of blocks that fit the tensors.
    """

    epoch: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Registration:
    """The registration of one rank.

    Attributes:
        rank: Number of the rank.
        world_size: Number of ranks of the pool.
        boot_id: Identifies the process; a restarted process has another one.
        options: Equal for all ranks.
        layers: Spec of each layer of the rank, in the order of the model.
        available_bytes: Memory available for the tensors.
        held: Tensors kept from an earlier stream; None if there are none.
        device: Shown to operators only.
        host: Shown to operators only.
        pid: Shown to operators only.
        last_epoch: Newest epoch that the rank received from this server or an earlier one; 0 for none.
        fences: Whether the rank answers fences.
        declared: What an engine declares, from which options and layers follow; None if the server plans the memory.
        num_host_blocks: Number of blocks that fit its host memory; 0 unless an engine declares memory, with caching.
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
    declared: DeclaredMemory | None = None
    num_host_blocks: int = 0

    def check(self) -> None:
        """Raises InvalidArgumentError if a value is out of range; names the field."""
        check_range("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        check_range("rank", self.rank, 0, self.world_size - 1)
        low, high = _BOOT_ID_LENGTHS
        if not low <= len(self.boot_id) <= high:
            raise InvalidArgumentError("boot_id", f"needs {low} to {high} characters")
        if self.available_bytes <= 0:
            raise InvalidArgumentError("available_bytes", "0: no memory is left for the KV cache", reason="NO_MEMORY")
        check_range("available_bytes", self.available_bytes, 1, MAX_AVAILABLE_BYTES)
        if self.declared:
            with fields_renamed("declared.{}".format):
                self.declared.check()
                check_range("size_bytes", self.declared.size_bytes, 1, self.available_bytes)
        caches = self.declared is not None and self.declared.config.enable_caching
        check_range("num_host_blocks", self.num_host_blocks, 0, MAX_BLOCKS if caches else 0)
        check_range("layers", len(self.layers), 1, MAX_LAYERS)
        if self.held:
            check_range("held.epoch", self.held.epoch, 1, self.last_epoch)
            check_range("held.num_blocks", self.held.num_blocks, 2, MAX_BLOCKS)
        for name in ("device", "host"):
            check_size(name, getattr(self, name), _TEXT_BYTES)
        with fields_renamed(lambda field: f"options.{field.removeprefix('config.')}"):
            self.options.check()

    def layer_field(self, name: str) -> str:
        """Returns the path of a layer in the registration, for errors."""
        if self.declared is None:
            return f'layers["{name}"]'
        i = next(i for i, group in enumerate(self.declared.config.groups) if name in group.layer_names)
        return f'declared.config.groups[{i}].spec.layers["{name}"]'


@dataclass(frozen=True, slots=True)
class Allocated:
    """The result of a rank's allocation.

    Attributes:
        epoch: Epoch of the plan.
        num_blocks: Number of blocks that fit the tensors.
        allocated_bytes: Memory of the tensors.
    """

    epoch: int
    num_blocks: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The state of a pool's ranks that a restarted server needs to accept them again.

    Attributes:
        epoch: Epoch of the pool.
        options: The options of all ranks.
        plan: The plan of this epoch; None if the pool is not open in it.
        members: Registration and allocation of each rank, in rank order; empty if the pool is not open.
    """

    epoch: int
    options: RankGroupOptions
    plan: Plan | None = None
    members: tuple[tuple[Registration, Allocated], ...] = ()


@dataclass(frozen=True, slots=True)
class MappingProcess:
    """A process that may map the memory of a rank; see MappingProcess in pool.proto."""

    pid: int
    client_name: str


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The state of a rank at one moment; see RankInfo in pool.proto."""

    rank: Rank
    state: RankState
    device: str = ""
    host: str = ""
    pid: int = 0
    available_bytes: int = 0
    allocated_bytes: int = 0
    num_blocks: int = 0
    mapping_processes: tuple[MappingProcess, ...] = ()


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
    """The pool is open; `num_blocks` and `num_host_blocks` are the smallest numbers over all ranks."""

    epoch: int
    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0


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
    killed_session_numbers: tuple[int, ...] = ()


ServerMessage = Registered | Planned | Ready | PoolStatus | FenceSet
"""A message of the server to a rank."""
