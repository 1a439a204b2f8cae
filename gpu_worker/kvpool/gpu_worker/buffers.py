"""Checks of a rank's plan: its consistency, and whether the allocated buffers match it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.grouping import layer_specs
from kvpool.core.planning.plan import KVCacheConfig, KVCacheTensor


def block_strides_bytes(config: KVCacheConfig) -> tuple[int, ...]:
    """Distance from one block to the next in each tensor, in bytes.

    Raises:
        InvalidArgumentError: A tensor is empty or its size is not a multiple of num_blocks.
    """
    for i, tensor in enumerate(config.tensors):
        if tensor.size_bytes <= 0 or tensor.size_bytes % config.num_blocks:
            layers = ", ".join(map(repr, tensor.shared_by))
            raise InvalidArgumentError(
                f"tensors[{i}].size_bytes",
                f"layer {layers}: {tensor.size_bytes} bytes are not a multiple of {config.num_blocks} pages",
            )
    return tuple(tensor.size_bytes // config.num_blocks for tensor in config.tensors)


def pages_by_layer(
    config: KVCacheConfig, num_blocks: int, buffers: Sequence[torch.Tensor]
) -> dict[str, tuple[torch.Tensor, int]]:
    """Finds the pages of each layer.

    Args:
        config: The plan of the rank.
        num_blocks: Number of blocks that each buffer must hold.
        buffers: int8 (bytes,), one per tensor of the config.

    Returns:
        For each layer its buffer from the first page on, and the distance from one page to the next in bytes.

    Raises:
        InvalidArgumentError: A buffer has another shape or is too small; or a layer is in no buffer, in two buffers,
            overlaps with a layer of its own group, or has a page that is not within a block.
    """
    if num_blocks < 1:
        raise InvalidArgumentError("num_blocks", f"{num_blocks} is not at least 1")
    if len(buffers) != len(config.tensors):
        raise InvalidArgumentError("buffers", f"{len(buffers)} for {len(config.tensors)} tensors")
    layers = {
        name: (i, spec.page_size_bytes) for i, group in enumerate(config.groups) for name, spec in layer_specs(group)
    }
    found: dict[str, tuple[torch.Tensor, int]] = {}
    strides = block_strides_bytes(config)
    for i, (tensor, buffer, stride) in enumerate(zip(config.tensors, buffers, strides, strict=True)):
        pages = _pages(f"tensors[{i}]", tensor, layers, stride)
        _check_size(f"buffers[{i}]", buffer, num_blocks, stride, tensor.shared_by)
        for page in pages:
            if page.layer_name in found:
                raise InvalidArgumentError(
                    f"tensors[{i}]", f"layer {page.layer_name!r} is in two buffers, or twice in one"
                )
            found[page.layer_name] = (buffer[page.offset_bytes :], stride)
        _check_neighbours(f"tensors[{i}]", pages)
    for name in layers:
        if name not in found:
            raise InvalidArgumentError("tensors", f"layer {name!r} is in no buffer")
    return found


class _Page(NamedTuple):
    """The page of a layer in a block of a buffer."""

    offset_bytes: int
    layer_name: str
    group: int
    size_bytes: int


def _pages(field: str, tensor: KVCacheTensor, layers: Mapping[str, tuple[int, int]], stride: int) -> list[_Page]:
    """Returns the pages of a tensor in a block, of the layers whose group and page size are given."""
    offsets = tensor.offsets_bytes or (0,) * len(tensor.shared_by)
    if len(offsets) != len(tensor.shared_by):
        raise InvalidArgumentError(field, f"{len(offsets)} offsets for {len(tensor.shared_by)} layers")
    pages = []
    for offset, name in zip(offsets, tensor.shared_by, strict=True):
        if name not in layers:
            raise InvalidArgumentError(field, f"layer {name!r} is in no group of this rank")
        page = _Page(offset, name, *layers[name])
        end = offset + page.size_bytes
        if end > stride or (end < stride and not tensor.offsets_bytes):
            raise InvalidArgumentError(
                field, f"layer {name!r} has bytes {offset} to {end} of a block, and blocks have {stride}"
            )
        pages.append(page)
    return pages


def _check_neighbours(field: str, pages: Iterable[_Page]) -> None:
    """Checks that pages of one group do not overlap."""
    last: dict[int, _Page] = {}
    for page in sorted(pages):
        before = last.get(page.group, page)
        if before is not page and page.offset_bytes < before.offset_bytes + before.size_bytes:
            raise InvalidArgumentError(
                field, f"layer {page.layer_name!r} overlaps with {before.layer_name!r} of the same group"
            )
        last[page.group] = page


def _check_size(field: str, buffer: torch.Tensor, num_blocks: int, stride: int, layer_names: Iterable[str]) -> None:
    if buffer.dtype != torch.int8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise InvalidArgumentError(
            field, f"{buffer.dtype} of shape {tuple(buffer.shape)} is not a one-dimensional int8 buffer"
        )
    if stride * num_blocks > buffer.numel():
        first = next(iter(layer_names), "")
        raise InvalidArgumentError(
            field, f"layer {first!r} needs {num_blocks} blocks of {stride} bytes; the buffer has {buffer.numel()} bytes"
        )
