"""The memory of a rank that lends it, and its host memory: bytes that the rank itself neither maps nor views."""

import os
from threading import Lock

import torch

from kvpool.core.errors import AbortedError, ExhaustedError, WrongStateError
from kvpool.core.planning.plan import KVCacheConfig
from kvpool.gpu_worker.layouts import LayerCache
from kvpool.gpu_worker.rank_effects import Allocation
from kvpool.lending.memory_file import close_all
from kvpool.lending.memory_folder import MemoryFolder


class LentCache:
    """Memory in a folder. The cache thread of the rank calls its methods; any thread may call `duplicate`.

    Attributes:
        allocation: The memory; None while there is none.
    """

    buffers: tuple[torch.Tensor, ...] = ()

    def __init__(self, folder: MemoryFolder, num_host_blocks: int, held: Allocation | None = None) -> None:
        """Starts with the memory of an earlier process, or without memory.

        Args:
            folder: Folder of the memory.
            num_host_blocks: Number of blocks in host memory.
            held: The memory of the earlier process; None for none.

        Raises:
            OSError: The memory of the earlier process cannot be opened.
            WrongStateError: Its host memory has another size.
        """
        self._folder = folder
        self._num_host_blocks = num_host_blocks
        self.allocation = held
        self._lock = Lock()
        self._descriptors = folder.open() if held else ()
        found_bytes = sum(os.fstat(descriptor).st_size for descriptor in self._descriptors[1:])
        if found_bytes != self.host_bytes:
            self.close()
            message = f"an earlier process had {found_bytes} bytes, and this one has {self.host_bytes}"
            raise WrongStateError("SIZE_DIFFERS", message, field="host_memory")

    @property
    def allocated_bytes(self) -> int:
        """Size of the memory."""
        allocation = self.allocation
        return allocation.allocated_bytes if allocation else 0

    @property
    def host_bytes(self) -> int:
        """Size of the host memory."""
        allocation = self.allocation
        return allocation.allocated_bytes // allocation.num_blocks * self._num_host_blocks if allocation else 0

    def allocate(self, config: KVCacheConfig) -> Allocation:
        """Frees the memory, then allocates that of a plan: all of it, as engines lay it out for a number of blocks.

        Raises:
            ExhaustedError: It does not fit; no memory is held.
        """
        self.release()
        size_bytes = sum(tensor.size_bytes for tensor in config.tensors)
        try:
            host_bytes = size_bytes // config.num_blocks * self._num_host_blocks
            self._descriptors = self._folder.create(size_bytes, host_bytes)
        except MemoryError as error:
            raise ExhaustedError("OUT_OF_MEMORY", str(error)) from error
        self.allocation = Allocation(config, config.num_blocks, size_bytes)
        return self.allocation

    def view(self, num_blocks: int) -> tuple[KVCacheConfig, dict[str, LayerCache]]:
        """The configuration for the first blocks; there are no views."""
        return self.allocation.config_for(num_blocks) if self.allocation else KVCacheConfig(num_blocks, (), ()), {}

    def duplicate(self) -> tuple[tuple[int, ...], str]:
        """Other descriptors of the memory, which the caller closes, and what identifies it. See `ReadyMemory`.

        Raises:
            AbortedError: The memory was freed meanwhile.
        """
        with self._lock:
            if not self._descriptors:
                raise AbortedError("MEMORY_REPLACED", "another engine declared other memory meanwhile")
            return tuple(map(os.dup, self._descriptors)), self._folder.memory_id(self._descriptors)

    def release(self) -> None:
        """Deletes the memory. It is free when no process maps it."""
        self.close()
        self.allocation = None
        self._folder.delete()

    def close(self) -> None:
        """Closes the descriptors; the memory stays in its folder."""
        with self._lock:
            close_all(self._descriptors)
            self._descriptors = ()
