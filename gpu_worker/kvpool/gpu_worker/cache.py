"""The tensors that a rank holds for its pool: allocated by plan, seen by layer, freed to make room."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from kvpool.core.errors import ExhaustedError
from kvpool.core.planning.plan import KVCacheConfig
from kvpool.gpu_worker.layouts import LayerCache
from kvpool.gpu_worker.tensors import BufferAllocator, allocate_as_many, empty_buffer, reshape_kv_cache
from kvpool.gpu_worker.words import Allocation


class HeldCache:
    """A rank's buffers. For one thread at a time."""

    def __init__(
        self,
        device: torch.device,
        layouts: Mapping[str, str],
        reserve_bytes: int,
        allocate: BufferAllocator = empty_buffer,
    ) -> None:
        """Holds nothing yet.

        Args:
            device: Where the buffers lie.
            layouts: Name of the layout of each layer whose backend states one.
            reserve_bytes: Must stay free on the device beside them.
            allocate: Makes one buffer.
        """
        self._device = device
        self._layouts = layouts
        self._reserve_bytes = reserve_bytes
        self._allocate = allocate
        self._config: KVCacheConfig | None = None
        self._buffers: tuple[torch.Tensor, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return self._config is None

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """int8 (bytes,), one for each of the plan's tensors."""
        return self._buffers

    @property
    def allocated_bytes(self) -> int:
        """Memory of the buffers. Any thread may ask."""
        return sum(map(len, self._buffers))

    def allocate(self, config: KVCacheConfig) -> Allocation:
        """Allocates what is planned, or as many blocks of it as fit; what was held is freed first.

        Raises:
            ExhaustedError: Not even two blocks fit; nothing is held.
            InvalidArgumentError: A layout cannot see its layer's pages, or the plan is at odds with itself.
        """
        self.release()
        try:
            buffers, num_blocks = allocate_as_many(config, self._device, self._reserve_bytes, self._allocate)
        except MemoryError as error:
            raise ExhaustedError("OUT_OF_MEMORY", str(error)) from error
        views = reshape_kv_cache(config, num_blocks, buffers, self._layouts)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # zeroed on this thread's stream; steps run on others
        self._config, self._buffers = config, buffers
        return Allocation(config, num_blocks, sum(map(len, buffers)), _shapes(views))

    def view(self, num_blocks: int) -> tuple[KVCacheConfig, dict[str, LayerCache]]:
        """The layers' views of the first blocks, and the configuration that says so.

        Args:
            num_blocks: At most as many as were allocated.

        Raises:
            InvalidArgumentError: There are fewer.
        """
        config = self._config or KVCacheConfig(num_blocks, (), ())
        views = reshape_kv_cache(config, num_blocks, self._buffers, self._layouts)
        tensors = tuple(
            replace(tensor, size_bytes=tensor.size_bytes // config.num_blocks * num_blocks) for tensor in config.tensors
        )
        return KVCacheConfig(num_blocks, tensors, config.groups), views

    def release(self) -> None:
        """Frees what is held, as far as nobody else refers to it."""
        self._config, self._buffers = None, ()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _shapes(views: Mapping[str, LayerCache]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple(
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, view in views.items()
        for tensor in ((view,) if isinstance(view, torch.Tensor) else view)
    )
