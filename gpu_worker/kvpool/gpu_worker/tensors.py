"""A rank's buffers, and each layer's view of its pages in them, bound to the layers that read and write it.

1. All or nothing: an allocation that fails gives back what it took, and everything is checked before the first view is
   made or the first layer bound. Errors name the layer.
2. Buffers are zeroed. The null block (block 0) may be read by kernels that mask it afterwards, and NaN times 0 is NaN.
3. Views share the buffers' memory, with each other too: layers of different groups lie in one buffer, since no block
   belongs to two groups at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.grouping import layer_specs
from kvpool.core.planning.plan import KVCacheConfig
from kvpool.core.specs.base import KVCacheSpec
from kvpool.gpu_worker.buffers import buffers_by_layer, page_sizes_bytes
from kvpool.gpu_worker.layouts import LayerCache, LayerPages, default_layout, get_layout
from kvpool.gpu_worker.status import format_bytes

BufferAllocator = Callable[[int, torch.device], torch.Tensor]
"""Makes an int8 buffer (size_bytes,) of any content, or raises an error that `is_out_of_memory` knows."""

MIN_BLOCKS: Final = 2
"""The null block, and one to give."""

_MESSAGES: Final = ("can't allocate memory", "not enough memory", "CUDA error: out of memory")
"""What a RuntimeError of torch says that has no type of its own: on Linux, on Windows, and from CUDA's driver."""


class CachedLayer(Protocol):
    """A runner's attention or state layer.

    Attributes:
        kv_cache: What it reads and writes, as its backend sees it.
    """

    kv_cache: LayerCache


def empty_buffer(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocates without writing.

    On CPU, where the kernel overcommits, memory is taken only when it is written: a limit on the process makes the
    failure come here.
    """
    return torch.empty(size_bytes, dtype=torch.int8, device=device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed for want of memory, on a GPU or on CPU."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def allocate_buffers(
    config: KVCacheConfig, device: torch.device, allocate: BufferAllocator = empty_buffer
) -> tuple[torch.Tensor, ...]:
    """Allocates what was planned.

    Returns:
        A zeroed int8 buffer (size_bytes,) for each of the config's tensors.

    Raises:
        MemoryError: It does not fit; nothing stays allocated.
        InvalidArgumentError: A tensor is no whole number of pages.
    """
    buffers = _allocate(config, config.num_blocks, device, allocate, reserve_bytes=0)
    if buffers is None:
        raise _too_little(config, config.num_blocks, device)
    return _zeroed(buffers)


def allocate_as_many(
    config: KVCacheConfig,
    device: torch.device,
    reserve_bytes: int = 0,
    allocate: BufferAllocator = empty_buffer,
) -> tuple[tuple[torch.Tensor, ...], int]:
    """Allocates what was planned, or the most blocks that fit.

    What fits is found by allocating, for the free memory that a device reports may lie in pieces: by bisection, in at
    most 3 + log2(num_blocks) tries, none of which writes.

    Args:
        config: What was planned.
        device: Where.
        reserve_bytes: Must be free on the device beside the buffers, for activations and graphs.
        allocate: Makes one buffer.

    Returns:
        The zeroed int8 buffers, and the blocks that they hold, [2, config.num_blocks].

    Raises:
        MemoryError: Not even two blocks fit, or memory shrank meanwhile; nothing stays allocated.
        InvalidArgumentError: A tensor is no whole number of pages.
    """
    fits, fails = 0, config.num_blocks + 1
    num_blocks = config.num_blocks
    while True:
        buffers = _allocate(config, num_blocks, device, allocate, reserve_bytes)
        if buffers is None:
            fails = min(fails, num_blocks)
            if num_blocks <= max(fits, MIN_BLOCKS):
                raise _too_little(config, num_blocks, device)
        else:
            fits = num_blocks
            if fails - fits == 1:
                return _zeroed(buffers), num_blocks
            del buffers
            _give_back(device)
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
        config: What was planned.
        num_blocks: Blocks of the pool: the least of all ranks, so the buffers may hold more.
        buffers: int8 (bytes,), one for each of the config's tensors.
        layouts: Name of the layout of each layer whose backend states one; others get the default of their kind.
        kernel_block_sizes: Of each group, the tokens of a block as its kernels see it, 0 for the group's own; empty for
            all groups' own.

    Returns:
        The views, by layer, group by group.

    Raises:
        InvalidArgumentError: Buffers, layers and groups do not fit each other, or a layout cannot see a layer's pages.
    """
    layouts = layouts or {}
    sizes = group_kernel_block_sizes(len(config.groups), kernel_block_sizes)
    specs = {name: spec for group in config.groups for name, spec in layer_specs(group)}
    unknown = next((name for name in layouts if name not in specs), None)
    if unknown is not None:
        raise InvalidArgumentError("layouts", f"layer {unknown!r} is in no group of this rank")
    buffer_of = buffers_by_layer(config, num_blocks, buffers)
    return {
        name: get_layout(name, layouts.get(name) or _default(name, spec)).view(
            LayerPages(name, spec, buffer_of[name], num_blocks, kernel_block_size)
        )
        for group, kernel_block_size in zip(config.groups, sizes, strict=True)
        for name, spec in layer_specs(group)
    }


def bind_kv_cache(
    kv_caches: Mapping[str, LayerCache],
    layers: Mapping[str, CachedLayer],
    shared_layers: Mapping[str, str] | None = None,
) -> None:
    """Gives each layer its view.

    Args:
        kv_caches: The views, by layer.
        layers: The layers of the rank that read or write a cache, by name; their `kv_cache` is set.
        shared_layers: Of layers without a cache of their own, the layer whose cache they read.

    Raises:
        InvalidArgumentError: A layer has no view, or a view no layer; nothing is changed.
    """
    views = dict(kv_caches)
    for name, target in (shared_layers or {}).items():
        if name in kv_caches:
            raise InvalidArgumentError("shared_layers", f"layer {name!r} has a cache of its own")
        if target not in kv_caches:
            raise InvalidArgumentError("shared_layers", f"layer {name!r} shares with {target!r}, which has no cache")
        views[name] = kv_caches[target]
    for name in layers:
        if name not in views:
            raise InvalidArgumentError("layers", f"layer {name!r} has no cache, and shares none")
    for name in views:
        if name not in layers:
            raise InvalidArgumentError("layers", f"layer {name!r} has a cache, and is not among the runner's layers")
    for name, layer in layers.items():
        layer.kv_cache = views[name]


def group_kernel_block_sizes(num_groups: int, kernel_block_sizes: Sequence[int]) -> Sequence[int]:
    """A kernel block size for each group, 0 for its own; none at all stands for all groups' own.

    Raises:
        InvalidArgumentError: There are more or fewer than groups.
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
    """Allocates buffers of this many blocks; None, and all given back, if they do not fit."""
    sizes = [page * num_blocks for page in page_sizes_bytes(config)]
    buffers: list[torch.Tensor] = []
    try:
        for size_bytes in [*sizes, reserve_bytes] if reserve_bytes else sizes:
            buffers.append(allocate(size_bytes, device))  # noqa: PERF401 - what was allocated must be at hand to clear
    except Exception as error:
        buffers.clear()  # the traceback holds this frame, and so would hold the buffers
        if not is_out_of_memory(error):
            raise
    else:
        del buffers[len(sizes) :]
        return buffers
    _give_back(device)
    return None


def _zeroed(buffers: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(buffer.zero_() for buffer in buffers)


def _give_back(device: torch.device) -> None:
    """Returns what torch keeps of freed buffers to the device: in pieces of other sizes it would be of no use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _too_little(config: KVCacheConfig, num_blocks: int, device: torch.device) -> MemoryError:
    pages = page_sizes_bytes(config)
    return MemoryError(
        f"{num_blocks} blocks of {sum(pages)} bytes ({format_bytes(num_blocks * sum(pages))} in {len(pages)} buffers)"
        f" do not fit {device}"
    )
