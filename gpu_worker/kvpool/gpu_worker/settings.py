"""Settings of a worker, parsed once at the entry point. Does not import torch."""

from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ranks.messages import MAX_AVAILABLE_BYTES, MAX_WORLD_SIZE, RankGroupOptions
from kvpool.core.specs.pool_config import check_pool_name
from kvpool.wire.address import parse_seeds
from kvpool.wire.channels import ClientCredentials

DEFAULT_DEVICE: Final = "cuda:0"
DEFAULT_GPU_MEMORY_UTILIZATION: Final = 0.9
DEFAULT_RESERVE_BYTES: Final = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """A worker's settings.

    Attributes:
        server: Address of the server: `host:port` or `unix:/path`; or those of a primary and its standbys, separated
            by commas.
        pool: Name of the pool.
        rank: Number of this rank, [0, world_size).
        world_size: Number of ranks of the pool, [1, 4096].
        options: Options that must be equal on all ranks of the pool.
        device: "cpu", or a CUDA device such as "cuda:0".
        memory_bytes: Memory for the KV cache; None for a share of the device memory, on CUDA devices only.
        gpu_memory_utilization: The share, (0, 1]. Memory that is already in use counts towards it.
        reserve_bytes: Memory left free on a CUDA device for later allocations, such as activations and graphs.
        host_memory_bytes: Host memory for evicted blocks, of a rank that lends its memory; 0 for none.
        access: Credentials for the server.
    """

    server: str
    pool: str
    rank: int
    world_size: int
    options: RankGroupOptions
    device: str = DEFAULT_DEVICE
    memory_bytes: int | None = None
    gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION
    reserve_bytes: int = DEFAULT_RESERVE_BYTES
    host_memory_bytes: int = 0
    access: ClientCredentials = ClientCredentials()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        try:
            seeds = parse_seeds(self.server)
        except ValueError as error:
            raise InvalidArgumentError("server", str(error)) from error
        try:
            for seed in seeds:
                self.access.check(seed)
        except ValueError as error:
            raise InvalidArgumentError("access", str(error)) from error
        check_pool_name("pool", self.pool)
        check_range("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        check_range("rank", self.rank, 0, self.world_size - 1)
        self.options.check()
        if self.memory_bytes is not None:
            check_range("memory_bytes", self.memory_bytes, 1, MAX_AVAILABLE_BYTES)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidArgumentError("gpu_memory_utilization", f"{self.gpu_memory_utilization} is not in (0, 1]")
        check_range("reserve_bytes", self.reserve_bytes, 0, MAX_AVAILABLE_BYTES)
        check_range("host_memory_bytes", self.host_memory_bytes, 0, MAX_AVAILABLE_BYTES)
