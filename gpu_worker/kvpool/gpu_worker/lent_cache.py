"""The memory of a rank that lends it: bytes that the rank itself neither maps nor views."""

import os
from threading import Lock

import torch

from kvpool.core.errors import AbortedError, ExhaustedError
from kvpool.core.planning.plan import KVCacheConfig
from kvpool.gpu_worker.layouts import LayerCache
from kvpool.gpu_worker.rank_effects import Allocation
from kvpool.lending.memory_folder import MemoryFolder


class LentCache:
    """Memory in a folder. The cache thread of the rank calls its methods; any thread may call `duplicate`.

    Attributes:
        allocation: The memory; None while there is none.
    """

    buffers: tuple[torch.Tensor, ...] = ()

    def __init__(self, folder: MemoryFolder, held: Allocation | None = None) -> None:
        """Starts with the memory of an earlier process, or without memory.

        Raises:
            OSError: The memory of the earlier process cannot be opened.
        """
        self._folder = folder
        self.allocation = held
        self._lock = Lock()
        self._descriptor = folder.open() if held else -1

    @property
    def allocated_bytes(self) -> int:
        """Size of the memory."""
        allocation = self.allocation
        return allocation.allocated_bytes if allocation else 0

    def allocate(self, config: KVCacheConfig) -> Allocation:
        """Frees the memory, then allocates that of a plan: all of it, as engines lay it out for a number of blocks.

        Raises:
            ExhaustedError: It does not fit; no memory is held.
        """
        self.release()
        size_bytes = sum(tensor.size_bytes for tensor in config.tensors)
        try:
            self._descriptor = self._folder.create(size_bytes)
        except MemoryError as error:
            raise ExhaustedError("OUT_OF_MEMORY", str(error)) from error
        self.allocation = Allocation(config, config.num_blocks, size_bytes)
        return self.allocation

    def view(self, num_blocks: int) -> tuple[KVCacheConfig, dict[str, LayerCache]]:
        """The configuration for the first blocks; there are no views."""
        return self.allocation.config_for(num_blocks) if self.allocation else KVCacheConfig(num_blocks, (), ()), {}

    def duplicate(self) -> tuple[int, str]:
        """Another descriptor of the memory, which the caller closes, and what identifies the memory.

        Raises:
            AbortedError: The memory was freed meanwhile.
        """
        with self._lock:
            if self._descriptor < 0:
                raise AbortedError("MEMORY_REPLACED", "another engine declared other memory meanwhile")
            return os.dup(self._descriptor), self._folder.memory_id(self._descriptor)

    def release(self) -> None:
        """Deletes the memory. It is free when no process maps it."""
        self.close()
        self.allocation = None
        self._folder.delete()

    def close(self) -> None:
        """Closes the descriptor; the memory stays in its folder."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1
