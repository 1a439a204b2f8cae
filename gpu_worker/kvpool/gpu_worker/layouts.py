"""How attention backends see a layer's pages.

1. Block i of every layer is bytes [i * page_size_bytes, (i + 1) * page_size_bytes) of its buffer, whatever the backend:
   see docs/adr/0011. Layers of different groups, kinds and backends may so share a buffer.
2. A layout is a view: shape and order of strides follow the backend, nothing is moved or copied.
3. A page begins with what it holds, kernel block after kernel block, keys before values; its padding is at its end.

Source: the shapes are those that vLLM's backends ask for (`get_kv_cache_shape`, `get_kv_cache_stride_order`). Where
vLLM keeps all keys before all values, it restrides to rule 1 itself in models with Mamba layers: the kernels of
FlashAttention take any stride between blocks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import DTYPE_SIZES_BYTES, AttentionSpec, KVCacheSpec, dtype_size_bytes
from kvpool.core.specs.kinds import FP8_DS_MLA, EncoderOnlyAttentionSpec, MambaSpec, MLAAttentionSpec, allocation_spec

LayerCache = torch.Tensor | tuple[torch.Tensor, ...]
"""What a layer reads and writes: one tensor, or one for each part of a state."""

Axis = Literal["block", "kv", "token", "head", "element"]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer.

    Attributes:
        layer_name: The layer, for errors.
        spec: Its own spec.
        buffer: int8 (at least num_blocks * page_size_bytes,), contiguous. Other layers may share it.
        num_blocks: Blocks to be seen, the null block included.
        kernel_block_size: Tokens of a block as the backend's kernels see it; 0 for the spec's block_size.
    """

    layer_name: str
    spec: KVCacheSpec
    buffer: torch.Tensor
    num_blocks: int
    kernel_block_size: int = 0

    @property
    def blocks_per_page(self) -> int:
        """Kernel blocks in a page.

        Raises:
            InvalidArgumentError: They do not fill it, or it is padded.
        """
        return kernel_blocks_per_block(self.layer_name, self.spec, self.kernel_block_size)

    def elements(self, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """The pages as elements of a type.

        Returns:
            The pages (num_blocks * elements of a page,), and the elements of a page.

        Raises:
            InvalidArgumentError: A page is not a whole number of them.
        """
        page_size_bytes = self.spec.page_size_bytes
        if not page_size_bytes:
            raise self.refusal("page_size_bytes", "its sizes are not declared")
        if page_size_bytes % dtype.itemsize:
            raise self.refusal(
                "page_size_bytes", f"a page of {page_size_bytes} bytes is no whole number of {dtype} elements"
            )
        if self.buffer.storage_offset() % dtype.itemsize:
            raise self.refusal("buffer", f"its buffer begins between two {dtype} elements of a larger one")
        pages = self.buffer[: self.num_blocks * page_size_bytes].view(dtype)
        return pages, page_size_bytes // dtype.itemsize

    def refusal(self, field: str, message: str) -> InvalidArgumentError:
        """The error that names this layer."""
        return InvalidArgumentError(field, f"layer {self.layer_name!r}: {message}")


def kernel_blocks_per_block(layer_name: str, spec: KVCacheSpec, kernel_block_size: int) -> int:
    """Kernel blocks in each of the pool's blocks; 1 if kernels see the pool's own (`kernel_block_size` 0).

    Raises:
        InvalidArgumentError: A kernel block does not divide the block, pages are padded, or blocks hold states.
    """
    if kernel_block_size in (0, spec.block_size):
        return 1
    ratio, rest = divmod(spec.block_size, max(kernel_block_size, 1))
    if kernel_block_size < 0 or rest:
        message = f"blocks of {spec.block_size} tokens are no whole number of {kernel_block_size}"
    elif not isinstance(allocation_spec(spec), AttentionSpec):
        message = f"a {type(spec).__name__} keeps states, which have no smaller blocks"
    elif spec.page_size_bytes != spec.content_size_bytes:
        message = f"pages padded to {spec.page_size_bytes} bytes cannot be seen as blocks of {kernel_block_size} tokens"
    else:
        return ratio
    raise InvalidArgumentError("kernel_block_size", f"layer {layer_name!r}: {message}")


def torch_dtype(layer_name: str, dtype: str) -> torch.dtype:
    """The torch type of a layer's elements.

    Args:
        layer_name: The layer, for the error.
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
    """How one backend sees pages."""

    def view(self, pages: LayerPages) -> LayerCache:
        """Makes the view of a layer's pages; writes nothing.

        Raises:
            InvalidArgumentError: The backend cannot see such pages; names the layer.
        """


@dataclass(frozen=True, slots=True)
class KeyValueLayout:
    """Keys and values of one head size.

    Attributes:
        shape: The axes as the backend indexes them.
        order: The axes as they lie in memory, blocks first.
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
        return _paged(pages, spec.dtype, {"kv": 2, "head": spec.num_kv_heads, "element": spec.head_size}, self)


@dataclass(frozen=True, slots=True)
class JoinedKeyValueLayout:
    """Keys and values joined into one vector, so that their sizes may differ."""

    shape: tuple[Axis, ...] = ("block", "token", "head", "element")
    order: tuple[Axis, ...] = ("block", "token", "head", "element")

    def view(self, pages: LayerPages) -> torch.Tensor:
        """See `KVCacheLayout`."""
        spec = _attention_spec(pages)
        elements = spec.head_size + (spec.head_size_v or spec.head_size)
        return _paged(pages, spec.dtype, {"head": spec.num_kv_heads, "element": elements}, self)


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """One latent vector a token; 656 bytes a token in fp8_ds_mla."""

    shape: tuple[Axis, ...] = ("block", "token", "element")
    order: tuple[Axis, ...] = ("block", "token", "element")

    def view(self, pages: LayerPages) -> torch.Tensor:
        """See `KVCacheLayout`."""
        spec = pages.spec
        if not isinstance(spec, MLAAttentionSpec):
            raise pages.refusal("spec", f"a {type(spec).__name__} keeps no latent vectors")
        if spec.cache_dtype_str == FP8_DS_MLA:
            return _paged(pages, "uint8", {"element": spec.token_size_bytes}, self)
        if spec.num_kv_heads != 1:
            raise pages.refusal("num_kv_heads", f"latent vectors have one head, not {spec.num_kv_heads}")
        return _paged(pages, spec.dtype, {"element": spec.head_size}, self)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The parts of a state, one after the other in a page: a tensor (num_blocks, *shape) each."""

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
                    f"dtypes[{i}]", f"part {i} begins at byte {offset_bytes}, which is between two {dtype} elements"
                )
            strides = (page, *(math.prod(shape[j + 1 :]) for j in range(len(shape))))
            parts.append(elements.as_strided((pages.num_blocks, *shape), strides, elements.storage_offset() + offset))
            offset_bytes += math.prod(shape) * dtype.itemsize
        if not parts:
            raise pages.refusal("shapes", "its sizes are not declared")
        return tuple(parts)


class _Axes(Protocol):
    """The two orders of axes that a layout has."""

    @property
    def shape(self) -> tuple[Axis, ...]: ...
    @property
    def order(self) -> tuple[Axis, ...]: ...


def _paged(pages: LayerPages, dtype: str, sizes: Mapping[Axis, int], axes: _Axes) -> torch.Tensor:
    """Strides a layer's pages: axes within a block are dense in their order, blocks are a page (or its part) apart."""
    elements, page = pages.elements(torch_dtype(pages.layer_name, dtype))
    per_page = pages.blocks_per_page
    sizes = {"block": pages.num_blocks * per_page, "token": pages.spec.block_size // per_page, **sizes}
    strides: dict[Axis, int] = {"block": page // per_page}
    dense = 1
    for axis in reversed(axes.order[1:]):
        strides[axis] = dense
        dense *= sizes[axis]
    return elements.as_strided(
        [sizes[axis] for axis in axes.shape], [strides[axis] for axis in axes.shape], elements.storage_offset()
    )


def _attention_spec(pages: LayerPages) -> AttentionSpec:
    spec = pages.spec
    if isinstance(spec, AttentionSpec) and not isinstance(spec, MLAAttentionSpec | EncoderOnlyAttentionSpec):
        return spec
    raise pages.refusal("spec", f"a {type(spec).__name__} keeps no keys and values of heads")


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
    "mla": LatentLayout(),
    "mamba": StateLayout(),
}


def register_layout(name: str, layout: KVCacheLayout) -> None:
    """Adds a backend's layout, for the life of the process.

    Raises:
        InvalidArgumentError: Another layout has the name.
    """
    if _LAYOUTS.setdefault(name, layout) is not layout:
        raise InvalidArgumentError("layout", f"{name!r} is registered already")


def get_layout(layer_name: str, name: str) -> KVCacheLayout:
    """The layout of this name, for a layer.

    Raises:
        InvalidArgumentError: None has it.
    """
    if name not in _LAYOUTS:
        raise InvalidArgumentError(
            "layout", f"layer {layer_name!r}: {name!r} is not known; known: {', '.join(_LAYOUTS)}"
        )
    return _LAYOUTS[name]


def check_layouts(layouts: Mapping[str, str], layers: Mapping[str, KVCacheSpec]) -> None:
    """Checks that each layout can see its layer's pages, before there is any memory.

    Pages of states are taken as they are: only the plan says how they are padded.

    Args:
        layouts: Name of the layout of each layer whose backend states one.
        layers: The rank's layers.

    Raises:
        InvalidArgumentError: A layer or layout is not known, or the layout is for another kind of layer.
    """
    for layer_name, name in layouts.items():
        if layer_name not in layers:
            raise InvalidArgumentError("layouts", f"layer {layer_name!r} is not one of the rank's")
        layout, spec = get_layout(layer_name, name), layers[layer_name]
        if isinstance(spec, MambaSpec):
            continue
        page = torch.empty(spec.page_size_bytes, dtype=torch.int8, device="meta")
        try:
            layout.view(LayerPages(layer_name, spec, page, num_blocks=1))
        except InvalidArgumentError as error:
            raise InvalidArgumentError("layout", f"{name!r} for {error.message}") from error


def layout_names() -> tuple[str, ...]:
    """The names of all layouts."""
    return tuple(_LAYOUTS)


def default_layout(spec: KVCacheSpec) -> str:
    """The layout of a kind of layer whose backend states none.

    Raises:
        InvalidArgumentError: The kind keeps nothing, or has no layout of its own (layers that share a table have).
    """
    if isinstance(spec, MambaSpec):
        return "mamba"
    if isinstance(spec, MLAAttentionSpec):
        return "mla"
    if isinstance(spec, AttentionSpec) and not isinstance(spec, EncoderOnlyAttentionSpec):
        return "flash_attn_diffkv" if spec.head_size_v else "flash_attn"
    raise InvalidArgumentError("spec", f"a {type(spec).__name__} has no tensors of its own")
