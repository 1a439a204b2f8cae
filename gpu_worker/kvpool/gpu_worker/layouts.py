"""Layouts: the views of a layer's pages that attention backends use.

1. Block i of every layer is bytes [i * block_stride_bytes, i * block_stride_bytes + page_size_bytes) of its buffer, for
   every backend, so that a block's owner touches only its bytes: layers of different groups, kinds and backends share a
   buffer. Kernels that need blocks without gaps cannot use padded pages, nor pages that have those of other layers
   between them; none of the backends here does.
2. A layout is a view: the shape and the order of strides follow the backend, and nothing is moved or copied.
3. A page starts with its contents, kernel block after kernel block, keys before values. Padding is at its end.

Source: the shapes are those of vLLM's backends (`get_kv_cache_shape`, `get_kv_cache_stride_order`). Where vLLM keeps
all keys before all values, it restrides to rule 1 itself in models with Mamba layers, because the kernels of
FlashAttention accept any stride between blocks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import DTYPE_SIZES_BYTES, AttentionSpec, KVCacheSpec, dtype_size_bytes
from kvpool.core.specs.kinds import EncoderOnlyAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs, allocation_spec

LayerCache = torch.Tensor | tuple[torch.Tensor, ...]
"""The cache of a layer: one tensor, or one tensor per part of a state."""

Axis = Literal["block", "kv", "token", "head", "element"]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer.

    Attributes:
        layer_name: Name of the layer, for errors.
        spec: Spec of the layer.
        buffer: int8 (bytes,), contiguous, from the first page on. Other layers may share it.
        num_blocks: Number of blocks in the view, including the null block.
        kernel_block_size: Tokens per kernel block; 0 for the spec's block_size.
        block_stride_bytes: Distance from one page to the next; 0 for page_size_bytes.
    """

    layer_name: str
    spec: KVCacheSpec
    buffer: torch.Tensor
    num_blocks: int
    kernel_block_size: int = 0
    block_stride_bytes: int = 0

    def elements(self, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """Views the pages as elements of a type.

        Returns:
            The pages and what is between them, and the distance from one page to the next; both in elements.

        Raises:
            InvalidArgumentError: Sizes are not multiples of the element size.
        """
        page_size_bytes = self.spec.page_size_bytes
        if not page_size_bytes:
            raise self.refusal("page_size_bytes", "the spec does not declare its sizes")
        stride_bytes = self.block_stride_bytes or page_size_bytes
        for what, size_bytes in (("page", page_size_bytes), ("block", stride_bytes)):
            if size_bytes % dtype.itemsize:
                raise self.refusal(
                    "page_size_bytes", f"a {what} of {size_bytes} bytes is not a whole number of {dtype} elements"
                )
        if self.buffer.storage_offset() % dtype.itemsize:
            raise self.refusal("buffer", f"the buffer is not aligned to {dtype} elements of its storage")
        end = (self.num_blocks - 1) * stride_bytes + page_size_bytes
        return self.buffer[:end].view(dtype), stride_bytes // dtype.itemsize

    def refusal(self, field: str, message: str) -> InvalidArgumentError:
        """Makes an error that names this layer."""
        return InvalidArgumentError(field, f"layer {self.layer_name!r}: {message}")


def kernel_blocks_per_block(layer_name: str, spec: KVCacheSpec, kernel_block_size: int) -> int:
    """Number of kernel blocks per block of the pool; 1 if `kernel_block_size` is 0.

    Raises:
        InvalidArgumentError: The kernel block size does not divide the block size, or pages are padded or hold states.
    """
    if kernel_block_size in (0, spec.block_size):
        return 1
    ratio, rest = divmod(spec.block_size, max(kernel_block_size, 1))
    if kernel_block_size < 0 or rest:
        message = f"{kernel_block_size} does not divide blocks of {spec.block_size} tokens"
    elif not isinstance(allocation_spec(spec), AttentionSpec):
        message = f"a {type(spec).__name__} keeps states, which cannot be split into kernel blocks"
    elif spec.page_size_bytes != spec.content_size_bytes:
        message = (
            f"pages padded to {spec.page_size_bytes} bytes cannot be split into blocks of {kernel_block_size} tokens"
        )
    elif kernel_block_size % (tokens_per_state := _tokens_per_state(spec)):
        message = f"{kernel_block_size} is not a multiple of the {tokens_per_state} tokens of a state"
    else:
        return ratio
    raise InvalidArgumentError("kernel_block_size", f"layer {layer_name!r}: {message}")


def _tokens_per_state(spec: KVCacheSpec) -> int:
    """Tokens of one state of a layer, or of the layer of a group whose states have the most tokens."""
    layers = [layer for _, layer in spec.layers] if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return max(layer.tokens_per_state if isinstance(layer, AttentionSpec) else 1 for layer in layers)


def torch_dtype(layer_name: str, dtype: str) -> torch.dtype:
    """The torch type of a layer's elements.

    Args:
        layer_name: Name of the layer, for the error.
        dtype: One of `DTYPE_SIZES_BYTES`.

    Raises:
        InvalidArgumentError: The name is unknown, or this torch has no such type or one of another size.
    """
    try:
        size_bytes = dtype_size_bytes("dtype", dtype)
    except InvalidArgumentError as error:
        raise InvalidArgumentError("dtype", f"layer {layer_name!r}: {error.message}") from None
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or found.itemsize != size_bytes:
        known = ", ".join(name for name in DTYPE_SIZES_BYTES if isinstance(getattr(torch, name, None), torch.dtype))
        raise InvalidArgumentError(
            "dtype", f"layer {layer_name!r}: torch {torch.__version__} has no {dtype!r}; it has {known}"
        )
    return found


class KVCacheLayout(Protocol):
    """The layout of one backend."""

    def view(self, pages: LayerPages) -> LayerCache:
        """Makes the view of a layer's pages without writing.

        Raises:
            InvalidArgumentError: The layout cannot represent such pages; names the layer.
        """


@dataclass(frozen=True, slots=True)
class KeyValueLayout:
    """Keys and values of one head size.

    Attributes:
        shape: The axes in the order of the backend's indices.
        order: The axes in memory order, blocks first.
    """

    shape: tuple[Axis, ...]
    order: tuple[Axis, ...]

    def view(self, pages: LayerPages) -> torch.Tensor:
        """See `KVCacheLayout`."""
        spec = _attention_spec(pages)
        if spec.head_size_v:
            raise pages.refusal(
                "head_size_v",
                f"values of {spec.head_size_v} elements and keys of {spec.head_size} need 'flash_attn_diffkv'",
            )
        sizes: dict[Axis, int] = {"kv": 2, "head": spec.num_kv_heads, "element": spec.head_size}
        return _paged(pages, spec, spec.dtype, sizes, self.shape, self.order)


class JoinedKeyValueLayout:
    """Keys and values concatenated into one vector, so their sizes may differ."""

    def view(self, pages: LayerPages) -> torch.Tensor:
        """See `KVCacheLayout`."""
        spec = _attention_spec(pages)
        elements = spec.head_size + (spec.head_size_v or spec.head_size)
        return _paged(pages, spec, spec.dtype, {"head": spec.num_kv_heads, "element": elements})


class LatentLayout:
    """One latent vector per state; its bytes, if it is packed, such as in fp8_ds_mla."""

    def view(self, pages: LayerPages) -> torch.Tensor:
        """See `KVCacheLayout`."""
        spec = pages.spec
        if not (isinstance(spec, AttentionSpec) and spec.is_latent):
            raise pages.refusal("spec", f"a {type(spec).__name__} keeps no latent vectors")
        if (num_heads := spec.num_head_slots or spec.num_kv_heads) != 1:
            raise pages.refusal("num_kv_heads", f"latent vectors have one head, not {num_heads}")
        if spec.state_content_bytes:
            return _paged(pages, spec, "uint8", {"element": spec.state_content_bytes})
        return _paged(pages, spec, spec.dtype, {"element": spec.head_size})


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The bytes of each state in each head, whatever a quantised cache packs into them.

    Attributes:
        order: The axes in memory order, blocks first.
    """

    order: tuple[Axis, ...]

    def view(self, pages: LayerPages) -> torch.Tensor:
        """See `KVCacheLayout`. The view is uint8 (num_blocks, heads, states per block, bytes), as in vLLM."""
        spec = pages.spec
        if not isinstance(spec, AttentionSpec) or isinstance(spec, EncoderOnlyAttentionSpec):
            raise pages.refusal("spec", f"a {type(spec).__name__} keeps no keys and values of heads")
        num_heads = spec.num_head_slots or spec.num_kv_heads
        sizes: dict[Axis, int] = {"head": num_heads, "element": spec.state_content_bytes or spec.head_elements_bytes}
        return _paged(pages, spec, "uint8", sizes, ("block", "head", "token", "element"), self.order)


class StateLayout:
    """The parts of a state, contiguous in a page; one tensor (num_blocks, *shape) per part."""

    def view(self, pages: LayerPages) -> tuple[torch.Tensor, ...]:
        """See `KVCacheLayout`."""
        spec = pages.spec
        if not isinstance(spec, MambaSpec):
            raise pages.refusal("spec", f"a {type(spec).__name__} keeps no states")
        kernel_blocks_per_block(pages.layer_name, spec, pages.kernel_block_size)
        parts = []
        offset_bytes = 0
        for i, (shape, name) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
            dtype = torch_dtype(pages.layer_name, name)
            elements, page = pages.elements(dtype)
            offset, rest = divmod(offset_bytes, dtype.itemsize)
            if rest:
                raise pages.refusal(
                    f"dtypes[{i}]", f"part {i} begins at byte {offset_bytes}, which is not aligned to {dtype} elements"
                )
            strides = (page, *(math.prod(shape[j + 1 :]) for j in range(len(shape))))
            parts.append(elements.as_strided((pages.num_blocks, *shape), strides, elements.storage_offset() + offset))
            offset_bytes += math.prod(shape) * dtype.itemsize
        if not parts:
            raise pages.refusal("shapes", "the spec does not declare its sizes")
        return tuple(parts)


def _paged(  # noqa: PLR0913, PLR0917 - what a view depends on
    pages: LayerPages,
    spec: AttentionSpec,
    dtype: str,
    sizes: Mapping[Axis, int],
    shape: tuple[Axis, ...] = (),
    order: tuple[Axis, ...] = (),
) -> torch.Tensor:
    """Strides a layer's pages: axes in a block are dense; blocks are a page apart, kernel blocks a part of one.

    Args:
        pages: The pages.
        spec: Their spec.
        dtype: Element type.
        sizes: Size of each axis within a token's part of a page.
        shape: The axes in the order of the backend's indices; by default block, token and those of `sizes`.
        order: The axes in memory order; by default the same.
    """
    shape, order = shape or ("block", "token", *sizes), order or ("block", "token", *sizes)
    elements, page = pages.elements(torch_dtype(pages.layer_name, dtype))
    per_page = kernel_blocks_per_block(pages.layer_name, spec, pages.kernel_block_size)
    if per_page > 1 and pages.block_stride_bytes not in (0, spec.page_size_bytes):
        raise pages.refusal("kernel_block_size", "pages that are not adjacent cannot be split")
    num_states = spec.block_size // spec.tokens_per_state
    sizes = {"block": pages.num_blocks * per_page, "token": num_states // per_page, **sizes}
    strides: dict[Axis, int] = {"block": page // per_page}
    dense = 1
    for axis in reversed(order[1:]):
        strides[axis] = dense
        dense *= sizes[axis]
    return elements.as_strided(
        [sizes[axis] for axis in shape], [strides[axis] for axis in shape], elements.storage_offset()
    )


def _attention_spec(pages: LayerPages) -> AttentionSpec:
    spec = pages.spec
    if not isinstance(spec, AttentionSpec) or spec.is_latent or isinstance(spec, EncoderOnlyAttentionSpec):
        raise pages.refusal("spec", f"a {type(spec).__name__} keeps no keys and values of heads")
    if spec.state_content_bytes or spec.num_head_slots:
        raise pages.refusal("state_content_bytes", "packed keys and values need 'packed_nhd' or 'packed_hnd'")
    return spec


_NHD: Final[tuple[Axis, ...]] = ("block", "kv", "token", "head", "element")
_HND: Final[tuple[Axis, ...]] = ("block", "kv", "head", "token", "element")
_KEYS_FIRST: Final[tuple[Axis, ...]] = ("kv", "block", "token", "head", "element")

_LAYOUTS: Final[dict[str, KVCacheLayout]] = {
    "flash_attn": KeyValueLayout(_KEYS_FIRST, _NHD),
    "flash_attn_hnd": KeyValueLayout(_KEYS_FIRST, _HND),
    "flash_attn_diffkv": JoinedKeyValueLayout(),
    "flashinfer_nhd": KeyValueLayout(_NHD, _NHD),
    "flashinfer_hnd": KeyValueLayout(_NHD, _HND),
    "triton": KeyValueLayout(_NHD, _NHD),
    "flex": KeyValueLayout(_NHD, _NHD),
    "packed_nhd": PackedLayout(("block", "token", "head", "element")),
    "packed_hnd": PackedLayout(("block", "head", "token", "element")),
    "mla": LatentLayout(),
    "mamba": StateLayout(),
}


def register_layout(name: str, layout: KVCacheLayout) -> None:
    """Registers a backend's layout for the lifetime of the process.

    Raises:
        InvalidArgumentError: Another layout has this name.
    """
    if _LAYOUTS.setdefault(name, layout) is not layout:
        raise InvalidArgumentError("layout", f"{name!r} is registered already")


def get_layout(layer_name: str, name: str) -> KVCacheLayout:
    """Finds the layout of a layer by name.

    Raises:
        InvalidArgumentError: No layout has this name.
    """
    if name not in _LAYOUTS:
        raise InvalidArgumentError(
            "layout", f"layer {layer_name!r}: {name!r} is not known; known: {', '.join(_LAYOUTS)}"
        )
    return _LAYOUTS[name]


def check_layouts(layouts: Mapping[str, str], layers: Mapping[str, KVCacheSpec]) -> None:
    """Checks that each layout can represent its layer's pages, before any memory is allocated.

    Pages of states are not checked, because only the plan determines their padding. Without a size, nothing is planned.

    Args:
        layouts: Layout name of each layer whose backend specifies one; other layers get the default of their kind.
        layers: The layers of the rank.

    Raises:
        InvalidArgumentError: A layer or layout is unknown, or the layout cannot represent the layer's pages.
    """
    defaults = {layer_name: default_layout(spec) for layer_name, spec in layers.items() if _has_pages(spec)}
    for layer_name, name in {**defaults, **layouts}.items():
        if layer_name not in layers:
            raise InvalidArgumentError("layouts", f"layer {layer_name!r} is not a layer of the rank")
        layout, spec = get_layout(layer_name, name), layers[layer_name]
        if isinstance(spec, MambaSpec):
            continue
        page = torch.empty(spec.page_size_bytes, dtype=torch.int8, device="meta")
        try:
            layout.view(LayerPages(layer_name, spec, page, num_blocks=1))
        except InvalidArgumentError as error:
            raise InvalidArgumentError("layout", f"{name!r} for {error.message}") from error


def _has_pages(spec: KVCacheSpec) -> bool:
    return bool(spec.page_size_bytes) and not isinstance(spec, EncoderOnlyAttentionSpec)


def default_layout(spec: KVCacheSpec) -> str:
    """The default layout of a kind of layer.

    Raises:
        InvalidArgumentError: The kind has no cache, or no layout of its own; layers that share a block table have one.
    """
    if isinstance(spec, MambaSpec):
        return "mamba"
    if isinstance(spec, AttentionSpec) and not isinstance(spec, EncoderOnlyAttentionSpec):
        if spec.is_latent:
            return "mla"
        if spec.state_content_bytes or spec.num_head_slots:
            return "packed_nhd"
        return "flash_attn_diffkv" if spec.head_size_v else "flash_attn"
    raise InvalidArgumentError("spec", f"a {type(spec).__name__} has no tensors of its own")
