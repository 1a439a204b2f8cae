"""What a lender needs of the rank that owns the memory; `kvpool.gpu_worker.lent_rank.LentRank` is the one in use."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvpool.core.ids import TableLease
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.lending.borrower_registry import BorrowerRegistry
from kvpool.v1.lending_pb2 import LendingOffer


@dataclass(frozen=True, slots=True)
class ReadyMemory:
    """Memory that an engine may map.

    Attributes:
        epoch: Epoch of the pool, which the memory belongs to.
        num_blocks: Number of blocks of the pool.
        num_host_blocks: Number of blocks of the pool in host memory.
        duplicate: Returns other descriptors of the memory, and of the host memory of the rank if it has any, which the
            caller closes; and what identifies the memory. Raises AbortedError if it was freed meanwhile.
    """

    epoch: int
    num_blocks: int
    num_host_blocks: int
    duplicate: Callable[[], tuple[tuple[int, ...], str]]


class MemoryOwner(Protocol):
    """A rank whose memory is lent. The event loop alone calls its methods."""

    @property
    def pool_name(self) -> str:
        """Name of the pool."""

    @property
    def offer(self) -> LendingOffer:
        """The memory that it has, or could allocate."""

    @property
    def borrowers(self) -> BorrowerRegistry:
        """The processes that map the memory."""

    @property
    def rank_fields(self) -> Mapping[str, object]:
        """Log fields of the rank."""

    async def ready_memory(self, declared: DeclaredMemory, weights_bytes: int = 0) -> ReadyMemory:
        """Makes the memory that an engine declares available, and waits until the pool is open.

        Args:
            declared: The memory.
            weights_bytes: What the engine's weights take of the device beside it; 0 for unknown.

        Raises:
            WrongStateError: Processes use memory of another layout, or the other ranks declared fewer blocks.
            KvpoolError: The declaration is not valid, the memory does not fit, or the server refuses the rank.
        """

    def report_gone(self, leases: Collection[TableLease]) -> None:
        """Reports sessions whose processes have exited."""
