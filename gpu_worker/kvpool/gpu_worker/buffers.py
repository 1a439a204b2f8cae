"""Checks of a rank's plan: its consistency, and whether the allocated buffers match it."""

from collections.abc import Iterable, Sequence

import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.grouping import layer_specs
from kvpool.core.planning.plan import KVCacheConfig


def page_sizes_bytes(config: KVCacheConfig) -> tuple[int, ...]:
    """Page size of each tensor, in bytes.

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


def buffers_by_layer(
    config: KVCacheConfig, num_blocks: int, buffers: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Finds the buffer of each layer.

    Args:
        config: The plan of the rank.
        num_blocks: Number of blocks that each buffer must hold.
        buffers: int8 (bytes,), one per tensor of the config.

    Raises:
        InvalidArgumentError: A buffer has another shape or is too small; or a layer is in no buffer, in two buffers,
            in a buffer with a layer of its own group, or in a buffer with another page size.
    """
    if num_blocks < 1:
        raise InvalidArgumentError("num_blocks", f"{num_blocks} is not at least 1")
    if len(buffers) != len(config.tensors):
        raise InvalidArgumentError("buffers", f"{len(buffers)} for {len(config.tensors)} tensors")
    pages = {name: spec.page_size_bytes for group in config.groups for name, spec in layer_specs(group)}
    group_of = {name: i for i, group in enumerate(config.groups) for name in group.layer_names}
    found: dict[str, torch.Tensor] = {}
    for i, (tensor, buffer) in enumerate(zip(config.tensors, buffers, strict=True)):
        for name in tensor.shared_by:
            if name not in pages:
                raise InvalidArgumentError(f"tensors[{i}]", f"layer {name!r} is in no group of this rank")
            if name in found:
                raise InvalidArgumentError(f"tensors[{i}]", f"layer {name!r} is in two buffers, or twice in one")
            found[name] = buffer
        _check_neighbours(f"tensors[{i}]", [(name, group_of[name], pages[name]) for name in tensor.shared_by])
        _check_size(f"buffers[{i}]", buffer, num_blocks, [(name, pages[name]) for name in tensor.shared_by])
    for name in pages:
        if name not in found:
            raise InvalidArgumentError("tensors", f"layer {name!r} is in no buffer")
    return found


def _check_neighbours(field: str, layers: Sequence[tuple[str, int, int]]) -> None:
    """Checks (name, group, page size) of the layers in one buffer: different groups and equal page sizes."""
    by_group: dict[int, str] = {}
    for name, group, page in layers:
        first, _, first_page = layers[0]
        if page != first_page:
            raise InvalidArgumentError(
                field, f"layer {name!r} has pages of {page} bytes, {first!r} in the same buffer has {first_page}"
            )
        if by_group.setdefault(group, name) != name:
            raise InvalidArgumentError(field, f"layer {name!r} is in the same group and buffer as {by_group[group]!r}")


def _check_size(field: str, buffer: torch.Tensor, num_blocks: int, pages: Iterable[tuple[str, int]]) -> None:
    if buffer.dtype != torch.int8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise InvalidArgumentError(
            field, f"{buffer.dtype} of shape {tuple(buffer.shape)} is not a one-dimensional int8 buffer"
        )
    for name, page in pages:
        if page * num_blocks > buffer.numel():
            raise InvalidArgumentError(
                field,
                f"layer {name!r} needs {num_blocks} pages of {page} bytes; the buffer has {buffer.numel()} bytes",
            )
