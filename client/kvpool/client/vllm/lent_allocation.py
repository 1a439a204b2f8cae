"""Puts lent memory in the place of the buffer that vLLM allocates for the KV cache, and says where its blocks are."""

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvpool.client.vllm.pool_config import UnsupportedError
from kvpool.lending.host_copies import Region


class LentAllocation(TorchFunctionMode):
    """A context in which vLLM's allocation of the KV cache returns a buffer that exists.

    vLLM makes one `torch.zeros(size_bytes, dtype=torch.int8, device=...)` and views of it. The mode answers this
    call in this thread, in this context, and no other. The contents of the buffer stay as they are.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        """Args: buffer: int8 (size_bytes,)."""
        super().__init__()
        self._buffer = buffer
        self._num_uses = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers one call of torch."""
        kwargs = kwargs or {}
        if func is torch.zeros and args == (self._buffer.numel(),) and self._matches(**kwargs):
            self._num_uses += 1
            return self._buffer
        return func(*args, **kwargs)

    def _matches(self, dtype: Any = None, device: Any = None, **more: Any) -> bool:
        wanted, own = torch.device(device or "cpu"), self._buffer.device
        is_own = wanted.type == own.type and wanted.index in (None, own.index)
        return dtype == torch.int8 and is_own and not more

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raises UnsupportedError if the buffer was not used exactly once."""
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        if exc_type is None and self._num_uses != 1:
            raise UnsupportedError(
                "the KV cache allocation", f"the lent memory was used {self._num_uses} times, not once"
            )


def check_views(buffer: torch.Tensor, caches: Any) -> None:
    """Raises UnsupportedError if a layer's cache lies outside the lent memory.

    Args:
        buffer: The memory, int8 (size_bytes,).
        caches: What the layers use: tensors, in lists of any depth.
    """
    start = buffer.data_ptr()
    count = 0
    for cache in _tensors(caches):
        count += 1
        if not start <= cache.data_ptr() < start + buffer.numel():
            raise UnsupportedError("the KV cache allocation", "a layer's cache is outside the lent memory")
    if not count:
        raise UnsupportedError("the KV cache allocation", "no layer uses the lent memory")


def block_regions(kv_cache_config: Any) -> list[Region]:
    """Returns the regions in which the memory has the bytes of its blocks, in the order of their offsets.

    Groups use the same bytes: a block belongs to one group at a time.

    Raises:
        UnsupportedError: The regions are not the whole memory, each byte once.
    """
    num_blocks, regions, are_apart = kv_cache_config.num_blocks, set[Region](), True
    for tensor in kv_cache_config.kv_cache_tensors:
        span_bytes = num_blocks * tensor.block_stride
        if tensor.layer_stride < span_bytes:  # the pages of all layers lie side by side in a block
            regions.add(Region(0, tensor.block_stride))
            continue
        are_apart = are_apart and not tensor.layer_stride % span_bytes  # a layer has a region, or one for each head
        end = tensor.offset + len(tensor.layers) * tensor.layer_stride
        regions.update(Region(offset, tensor.block_stride) for offset in range(tensor.offset, end, span_bytes))
    found = sorted(regions)
    ends = [0, *(offset + num_blocks * block_bytes for offset, block_bytes in found)]
    starts = [*(region.offset_bytes for region in found), kv_cache_config.kv_cache_tensors[0].size]
    if not are_apart or starts != ends:
        feature = f"the KV cache layout {kv_cache_config.kv_cache_layout} with host memory"
        raise UnsupportedError(feature, "its blocks share bytes, or leave some out")
    return found


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    if isinstance(caches, torch.Tensor):
        yield caches
    else:
        for cache in caches:
            yield from _tensors(cache)
