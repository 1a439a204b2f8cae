"""Puts lent memory in the place of the buffer that vLLM allocates for the KV cache."""

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvpool.client.vllm.pool_config import UnsupportedError


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


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    if isinstance(caches, torch.Tensor):
        yield caches
    else:
        for cache in caches:
            yield from _tensors(cache)
