"""The buffers of a rank, the layers' views of their pages, and the binding of views to layers.

1. Operations are atomic: a failed allocation frees its buffers, and all checks come before the first view is made or
   the first layer is bound. Errors name the layer.
2. Buffers are zeroed. Kernels may read the null block (block 0) and mask it afterwards, and NaN times 0 is NaN.
3. Views share the memory of the buffers. Layers of different groups share bytes, because no block belongs to two groups
   at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.grouping import layer_specs
from kvpool.core.planning.plan import KVCacheConfig
from kvpool.core.specs.base import KVCacheSpec
from kvpool.gpu_worker.buffers import block_strides_bytes, pages_by_layer
from kvpool.gpu_worker.layouts import LayerCache, LayerPages, default_layout, get_layout
from kvpool.wire.log_fields import format_bytes

BufferAllocator = Callable[[int, torch.device], torch.Tensor]
"""Allocates an uninitialized int8 buffer (size_bytes,), or raises an error that `is_out_of_memory` recognizes."""

MIN_BLOCKS: Final = 2
"""The null block and one usable block."""

_OUT_OF_MEMORY_MESSAGES: Final = ("can't allocate memory", "not enough memory", "CUDA error: out of memory")
"""Messages of torch's plain RuntimeError: on Linux, on Windows, and from the CUDA driver."""


class CachedLayer(Protocol):
    """An attention or state layer of a runner.

    Attributes:
        kv_cache: The layer's cache, as its backend sees it.
    """

    kv_cache: LayerCache


def empty_buffer(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocates without writing.

    On CPU the kernel overcommits, and memory is taken only when it is written. With a memory limit on the process the
    allocation fails here instead.
    """
    return torch.empty(size_bytes, dtype=torch.int8, device=device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed because memory is exhausted, on a GPU or on CPU."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_MESSAGES)


def allocate_buffers(
    config: KVCacheConfig, device: torch.device, allocate: BufferAllocator = empty_buffer
) -> tuple[torch.Tensor, ...]:
    """Allocates the buffers of a plan.

    Returns:
        A zeroed int8 buffer (size_bytes,) per tensor of the config.

    Raises:
        MemoryError: The buffers do not fit; nothing stays allocated.
        InvalidArgumentError: The size of a tensor is not a multiple of its page size.
    """
    buffers = _allocate(config, config.num_blocks, device, allocate, reserve_bytes=0)
    if buffers is None:
        raise _out_of_memory(config, config.num_blocks, device)
    return _zeroed(buffers)


def allocate_as_many(
    config: KVCacheConfig,
    device: torch.device,
    reserve_bytes: int = 0,
    allocate: BufferAllocator = empty_buffer,
) -> tuple[tuple[torch.Tensor, ...], int]:
    """Allocates the buffers of a plan, with as many of its blocks as fit.

    The number of blocks is found by bisection with real allocations, because the free memory that a device reports may
    be fragmented. It takes at most 3 + log2(num_blocks) tries, none of which writes.

    Args:
        config: The plan of the rank.
        device: Device of the buffers.
        reserve_bytes: Memory that must stay free on the device, for activations and graphs.
        allocate: Allocates one buffer.

    Returns:
        The zeroed int8 buffers, and the number of blocks that they hold, [2, config.num_blocks].

    Raises:
        MemoryError: Fewer than two blocks fit, or memory shrank meanwhile; nothing stays allocated.
        InvalidArgumentError: The size of a tensor is not a multiple of its page size.
    """
    fits, fails = 0, config.num_blocks + 1
    num_blocks = config.num_blocks
    while True:
        buffers = _allocate(config, num_blocks, device, allocate, reserve_bytes)
        if buffers is None:
            fails = min(fails, num_blocks)
            if num_blocks <= max(fits, MIN_BLOCKS):
                raise _out_of_memory(config, num_blocks, device)
        else:
            fits = num_blocks
            if fails - fits == 1:
                return _zeroed(buffers), num_blocks
            del buffers
            _empty_device_cache(device)
        num_blocks = max((fits + fails) // 2, MIN_BLOCKS) if fails - fits > 1 else fits


def reshape_kv_cache(
    config: KVCacheConfig,
    num_blocks: int,
    buffers: Sequence[torch.Tensor],
    layouts: Mapping[str, str] | None = None,
    kernel_block_sizes: Sequence[int] = (),
) -> dict[str, LayerCache]:
    """Makes each layer's view of its pages.

    Args:
        config: The plan of the rank.
        num_blocks: Number of blocks of the pool: the minimum over all ranks, so the buffers may hold more.
        buffers: int8 (bytes,), one per tensor of the config.
        layouts: Layout name of each layer whose backend specifies one; other layers get the default of their kind.
        kernel_block_sizes: Kernel block size in tokens per group, 0 for the group's block size; empty for the block
            size of every group.

    Returns:
        The views by layer name, group by group.

    Raises:
        InvalidArgumentError: Buffers, layers and groups are inconsistent, or a layout cannot represent a layer's pages.
    """
    layouts = layouts or {}
    sizes = group_kernel_block_sizes(len(config.groups), kernel_block_sizes)
    specs = {name: spec for group in config.groups for name, spec in layer_specs(group)}
    unknown = next((name for name in layouts if name not in specs), None)
    if unknown is not None:
        raise InvalidArgumentError("layouts", f"layer {unknown!r} is in no group of this rank")
    pages_of = pages_by_layer(config, num_blocks, buffers)
    return {
        name: get_layout(name, layouts.get(name) or _default(name, spec)).view(
            LayerPages(name, spec, pages_of[name][0], num_blocks, kernel_block_size, pages_of[name][1])
        )
        for group, kernel_block_size in zip(config.groups, sizes, strict=True)
        for name, spec in layer_specs(group)
    }


def bind_kv_cache(
    kv_caches: Mapping[str, LayerCache],
    layers: Mapping[str, CachedLayer],
    shared_layers: Mapping[str, str] | None = None,
) -> None:
    """Binds each layer to its view.

    Args:
        kv_caches: The views by layer name.
        layers: The layers of the rank that read or write a cache, by name; sets their `kv_cache`.
        shared_layers: For each layer without its own cache, the layer whose cache it reads.

    Raises:
        InvalidArgumentError: A layer has no view, or a view has no layer; nothing is changed.
    """
    views = dict(kv_caches)
    for name, target in (shared_layers or {}).items():
        if name in kv_caches:
            raise InvalidArgumentError("shared_layers", f"layer {name!r} has its own cache")
        if target not in kv_caches:
            raise InvalidArgumentError("shared_layers", f"layer {name!r} shares with {target!r}, which has no cache")
        views[name] = kv_caches[target]
    for name in layers:
        if name not in views:
            raise InvalidArgumentError("layers", f"layer {name!r} neither has nor shares a cache")
    for name in views:
        if name not in layers:
            raise InvalidArgumentError("layers", f"layer {name!r} has a cache, but the runner has no such layer")
    for name, layer in layers.items():
        layer.kv_cache = views[name]


def group_kernel_block_sizes(num_groups: int, kernel_block_sizes: Sequence[int]) -> Sequence[int]:
    """Returns a kernel block size per group, 0 for the group's block size; empty input means 0 for all groups.

    Raises:
        InvalidArgumentError: Their number is not the number of groups.
    """
    if kernel_block_sizes and len(kernel_block_sizes) != num_groups:
        raise InvalidArgumentError("kernel_block_sizes", f"{len(kernel_block_sizes)} for {num_groups} groups")
    return kernel_block_sizes or [0] * num_groups


def _default(layer_name: str, spec: KVCacheSpec) -> str:
    try:
        return default_layout(spec)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(error.field, f"layer {layer_name!r}: {error.message}") from None


def _allocate(
    config: KVCacheConfig, num_blocks: int, device: torch.device, allocate: BufferAllocator, reserve_bytes: int
) -> list[torch.Tensor] | None:
    """Allocates buffers of `num_blocks` blocks; returns None and frees all of them if they do not fit."""
    sizes = [stride * num_blocks for stride in block_strides_bytes(config)]
    buffers: list[torch.Tensor] = []
    try:
        for size_bytes in [*sizes, reserve_bytes] if reserve_bytes else sizes:
            buffers.append(allocate(size_bytes, device))  # noqa: PERF401 - the buffers must be reachable to be freed
    except Exception as error:
        buffers.clear()  # the traceback references this frame and would keep the buffers alive
        if not is_out_of_memory(error):
            raise
    else:
        del buffers[len(sizes) :]
        return buffers
    _empty_device_cache(device)
    return None


def _zeroed(buffers: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(buffer.zero_() for buffer in buffers)


def _empty_device_cache(device: torch.device) -> None:
    """Returns freed buffers from torch's cache to the device, because the next try needs other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _out_of_memory(config: KVCacheConfig, num_blocks: int, device: torch.device) -> MemoryError:
    strides = block_strides_bytes(config)
    return MemoryError(
        f"{num_blocks} blocks of {sum(strides)} bytes ({format_bytes(num_blocks * sum(strides))}"
        f" in {len(strides)} buffers) do not fit {device}"
    )
