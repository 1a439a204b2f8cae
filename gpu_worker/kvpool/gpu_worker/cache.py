"""The tensors that a rank holds for its pool."""

from collections.abc import Mapping

import torch

from kvpool.core.errors import ExhaustedError
from kvpool.core.planning.plan import KVCacheConfig
from kvpool.gpu_worker.layouts import LayerCache
from kvpool.gpu_worker.rank_effects import Allocation
from kvpool.gpu_worker.tensors import BufferAllocator, allocate_as_many, empty_buffer, reshape_kv_cache


class HeldCache:
    """The buffers of a rank. Not safe for concurrent use, except as noted.

    Attributes:
        buffers: int8 (bytes,), one per tensor of the plan; read only.
        allocation: What they were allocated for; None while there are none.
    """

    def __init__(
        self,
        device: torch.device,
        layouts: Mapping[str, str],
        reserve_bytes: int,
        allocate: BufferAllocator = empty_buffer,
    ) -> None:
        """Starts without buffers.

        Args:
            device: Device of the buffers.
            layouts: Layout name of each layer whose backend specifies one.
            reserve_bytes: Memory that must stay free on the device.
            allocate: Allocates one buffer.
        """
        self._device = device
        self._layouts = layouts
        self._reserve_bytes = reserve_bytes
        self._allocate = allocate
        self.allocation: Allocation | None = None
        self.buffers: tuple[torch.Tensor, ...] = ()

    @property
    def allocated_bytes(self) -> int:
        """Size of the buffers. Any thread may read it."""
        return sum(map(len, self.buffers))

    def allocate(self, config: KVCacheConfig) -> Allocation:
        """Frees the current buffers, then allocates those of a plan, with as many of its blocks as fit.

        Raises:
            ExhaustedError: Fewer than two blocks fit; no buffers are held.
            InvalidArgumentError: A layout cannot represent its layer's pages, or the plan is inconsistent.
        """
        self.release()
        try:
            buffers, num_blocks = allocate_as_many(config, self._device, self._reserve_bytes, self._allocate)
        except MemoryError as error:
            raise ExhaustedError("OUT_OF_MEMORY", str(error)) from error
        views = reshape_kv_cache(config, num_blocks, buffers, self._layouts)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # zeroed on this thread's stream; steps use other streams
        self.buffers = buffers
        self.allocation = Allocation(config, num_blocks, sum(map(len, buffers)), _shapes(views))
        return self.allocation

    def view(self, num_blocks: int) -> tuple[KVCacheConfig, dict[str, LayerCache]]:
        """Makes the layers' views of the first blocks, and the matching configuration.

        Args:
            num_blocks: Number of blocks, at most the allocated number.

        Raises:
            InvalidArgumentError: Fewer blocks are allocated.
        """
        config = self.allocation.config_for(num_blocks) if self.allocation else KVCacheConfig(num_blocks, (), ())
        return config, reshape_kv_cache(config, num_blocks, self.buffers, self._layouts)

    def release(self) -> None:
        """Drops the buffers; their memory is freed unless other references exist."""
        self.allocation, self.buffers = None, ()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _shapes(views: Mapping[str, LayerCache]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple(
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, view in views.items()
        for tensor in ((view,) if isinstance(view, torch.Tensor) else view)
    )
