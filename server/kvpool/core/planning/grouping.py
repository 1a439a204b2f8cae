"""Grouping of layers: layers of a group share block tables, and blocks of all groups have the same size in bytes.

1. All blocks of a pool have one size: (layers of the largest group) x (page size) bytes. Therefore all pages are made
   equally large, and groups get the same number of layers where possible.
2. Blocks of smaller pages get more tokens. A hit ends where a block of every group ends, so each block size is a
   multiple or a divisor of every other, and hits are multiples of the largest.
3. Padding fills the differences: pages that no such size fills, states, and groups with fewer layers than the largest.
   `KVCacheConfig.padding_bytes_per_block` reports the padding.
4. Layers of one kind that differ only in hidden size need no padding. They form one group, with a tensor of its own
   size for each layer.
5. Where a block has the pages of its layers side by side (`packed`), pages keep their sizes: see `packing`.
6. Pages of latent vectors are not padded next to sliding windows. If a page size would need it, windows are managed as
   full attention.

Source: the grouping follows vLLM 0.32's kv_cache_utils, except for rule 2 where pages have three sizes or do not divide
each other. vLLM then fills each page on its own, with sizes that may have a large common multiple, or only pads it.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.packing import pack_layers
from kvpool.core.specs.base import MAX_BLOCK_SIZE_TOKENS, AttentionSpec, KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    num_sink_tokens,
)
from kvpool.core.specs.pool_config import KVCacheGroup

Layers = Mapping[str, KVCacheSpec]

_IMBALANCE: Final = 1.5
"""Ratio of the largest to the smallest number of layers per kind up to which the largest sets the group size: a few
layers of padding cost less than many more groups."""


def group_layers(layers: Layers, *, hybrid: bool, packed: bool = False) -> tuple[KVCacheGroup, ...]:
    """Groups the layers of a whole model.

    Args:
        layers: Spec of each layer, in the order of the model. Encoder-only layers store nothing and are left out.
        hybrid: Whether kinds may be managed separately. If not, window layers are managed as full attention; their
            specs keep the window size.
        packed: Whether a block has the pages of all layers of a group side by side.

    Returns:
        The groups; empty for a model without a KV cache.

    Raises:
        InvalidArgumentError: `hybrid` is false, and the layers cannot be managed as one kind.
    """
    kept = {name: spec for name, spec in layers.items() if not isinstance(spec, EncoderOnlyAttentionSpec)}
    if not kept:
        return ()
    whole = _as_one_group(kept)
    if not whole and not hybrid:
        whole = _as_one_group(_as_full_attention(kept))
        if not whole:
            kinds = sorted({type(spec).__name__ for spec in kept.values()})
            raise InvalidArgumentError(
                "disable_hybrid_kv_cache_manager", f"{', '.join(kinds)} cannot be managed as one kind"
            )
    if whole or (packed and (whole := pack_layers(kept))):
        return whole
    return _latent_and_windows(kept) or _groups_of_one_size(_with_one_page_size(kept))


def _as_one_group(layers: Layers) -> tuple[KVCacheGroup, ...]:
    first, *others = layers.values()
    merged = first.merged_with(others)
    if merged:
        return (KVCacheGroup(merged, tuple(layers)),)
    if all(first.allocates_like(other) for other in others):
        return (KVCacheGroup(UniformTypeKVCacheSpecs(first.block_size, tuple(layers.items())), tuple(layers)),)
    return ()


def _as_full_attention(layers: Layers) -> Layers:
    """Replaces windows and chunks by full attention that remembers them, with the block size of full attention."""
    sizes = {spec.block_size for spec in layers.values() if isinstance(spec, FullAttentionSpec)}
    block_size = sizes.pop() if len(sizes) == 1 else 0
    return {
        name: _remember_window(spec, block_size or spec.block_size)
        if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
        else spec
        for name, spec in layers.items()
    }


def _remember_window(spec: AttentionSpec, block_size: int) -> FullAttentionSpec:
    if 0 < spec.page_size_padded < spec.content_size_bytes * block_size // spec.block_size:
        message = f"padded pages of windows do not fit blocks of {block_size} tokens"
        raise InvalidArgumentError("disable_hybrid_kv_cache_manager", message)
    kind = MLAAttentionSpec if spec.is_latent else FullAttentionSpec
    names = [field.name for field in fields(kind) if hasattr(spec, field.name)]
    return kind(**{name: getattr(spec, name) for name in names} | {"block_size": block_size})


def _latent_and_windows(layers: Layers) -> tuple[KVCacheGroup, ...]:
    """Groups latent vectors and windows as full attention if the vectors would need padding (rule 6); else empty."""
    kinds = {type(spec) for spec in layers.values()}
    if SlidingWindowSpec not in kinds or not kinds <= {SlidingWindowSpec, FullAttentionSpec, MLAAttentionSpec}:
        return ()
    largest = max(spec.page_size_bytes for spec in layers.values())
    if any(isinstance(spec, MLAAttentionSpec) and largest % spec.page_size_bytes for spec in layers.values()):
        return _as_one_group(_as_full_attention(layers))
    return ()


def _with_one_page_size(layers: Layers) -> Layers:
    """Gives all pages the size of the largest: more tokens per block (rule 2), then padding. States are only padded.

    Blocks that cannot be hit, of circular buffers, get as many tokens as fit.
    """
    largest = max(spec.page_size_bytes for spec in layers.values())
    filled = {spec: spec for spec in layers.values() if spec.page_size_bytes == largest}
    common = math.lcm(*(spec.block_size for spec in filled if isinstance(spec, AttentionSpec) and spec.is_cached))
    smaller = dict.fromkeys(spec for spec in layers.values() if spec not in filled)
    for spec in sorted(smaller, key=lambda spec: _most_tokens(spec, largest)):  # a larger size can be a multiple
        larger = spec
        if isinstance(spec, AttentionSpec):
            size = _block_size(spec, largest, common if spec.is_cached else 1)
            larger = replace(spec, block_size=size, page_size_padded=0)
            common = math.lcm(common, size) if spec.is_cached else common
        if isinstance(larger, AttentionSpec | MambaSpec) and larger.page_size_bytes != largest:
            larger = replace(larger, page_size_padded=largest)
        filled[spec] = larger
    return {name: filled[spec] for name, spec in layers.items()}


def _most_tokens(spec: KVCacheSpec, page_size_bytes: int) -> int:
    """Tokens of the largest block that fits a page of this size: a multiple of the spec's own block."""
    return min(page_size_bytes // spec.content_size_bytes, MAX_BLOCK_SIZE_TOKENS // spec.block_size) * spec.block_size


def _block_size(spec: AttentionSpec, page_size_bytes: int, common: int) -> int:
    """Tokens of the largest block that fits a page of this size, and is a multiple or a divisor of `common`.

    If there is none, the largest block that fits. Sinks fill whole blocks.
    """
    most = _most_tokens(spec, page_size_bytes)
    if sink_len := num_sink_tokens(spec):
        return _largest_divisor(sink_len, most, spec.block_size)
    multiple = math.lcm(common, spec.block_size)
    if multiple <= most:
        return most - most % multiple
    if multiple == common <= MAX_BLOCK_SIZE_TOKENS:
        return _largest_divisor(common, most, spec.block_size)
    return most


def _largest_divisor(number: int, limit: int, factor: int) -> int:
    """Returns the largest divisor of a multiple of `factor`, up to `limit`, that is a multiple of `factor`, too."""
    quotient = number // factor
    small = [i for i in range(1, math.isqrt(quotient) + 1) if quotient % i == 0]
    return max(i for i in small + [quotient // i for i in small] if i * factor <= limit) * factor


def _groups_of_one_size(layers: Layers) -> tuple[KVCacheGroup, ...]:
    """Groups layers whose specs merge, with the same number of layers per group where possible.

    Each group takes every n-th layer, not n consecutive ones, so that each pipeline stage has layers of every group.
    """
    alike = _layers_alike(layers)
    counts = [len(names) for names in alike]
    group_size = max(counts) if max(counts) < min(counts) * _IMBALANCE else min(counts)
    groups = []
    for names in alike:
        num_groups = -(-len(names) // group_size)
        groups += [_merged_group({name: layers[name] for name in names[i::num_groups]}) for i in range(num_groups)]
    return tuple(groups)


def _layers_alike(layers: Layers) -> list[list[str]]:
    """Returns the names of layers whose specs merge: equal ones, and full attention that remembers no or one window."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        by_spec.setdefault(spec, []).append(name)
    alike: list[list[str]] = []
    first: dict[KVCacheSpec, list[str]] = {}  # by spec without its window
    windowless = set[KVCacheSpec]()
    for spec, names in by_spec.items():
        bare = replace(spec, sliding_window=0, attention_chunk_size=0) if isinstance(spec, FullAttentionSpec) else spec
        if bare in windowless or (spec == bare and bare in first):
            windowless.discard(bare)
            first[bare] += names
            continue
        alike.append(names)
        first.setdefault(bare, names)
        if spec == bare:
            windowless.add(bare)
    return alike


def _merged_group(layers: Layers) -> KVCacheGroup:
    first, *others = layers.values()
    return KVCacheGroup(first.merged_with(others) or first, tuple(layers))


def groups_on_rank(groups: tuple[KVCacheGroup, ...], layers: Layers) -> tuple[KVCacheGroup, ...]:
    """Returns the groups with the layers of one rank only.

    A group without layers on the rank keeps its spec and gets no names, as requests still take blocks of it.
    """
    return tuple(_group_of_rank(group, tuple(name for name in group.layer_names if name in layers)) for group in groups)


def _group_of_rank(group: KVCacheGroup, names: tuple[str, ...]) -> KVCacheGroup:
    spec = group.spec
    if isinstance(spec, UniformTypeKVCacheSpecs) and names:
        own = set(names)
        spec = replace(spec, layers=tuple(layer for layer in spec.layers if layer[0] in own))
    return KVCacheGroup(spec, names)


def layer_specs(group: KVCacheGroup) -> tuple[tuple[str, KVCacheSpec], ...]:
    """Returns the layers of a group, each with its own spec."""
    if isinstance(group.spec, UniformTypeKVCacheSpecs):
        own = dict(group.spec.layers)
        return tuple((name, own[name]) for name in group.layer_names)
    return tuple((name, group.spec) for name in group.layer_names)


def undeclared_field(spec: KVCacheSpec) -> str:
    """Returns the name of a size that planning needs and the spec does not declare; empty if none is missing."""
    if spec.content_size_bytes:
        return ""
    if not isinstance(spec, AttentionSpec):
        return "shapes"
    return next((name for name in ("num_kv_heads", "head_size", "dtype") if not getattr(spec, name)), "head_size_v")


def field_value(spec: KVCacheSpec, field: str) -> object:
    """Returns a field of a spec for a message; field "type" is the class name, as in `differing_field`."""
    return type(spec).__name__ if field == "type" else getattr(spec, field)


def block_size_bytes(groups: tuple[KVCacheGroup, ...]) -> int:
    """Bytes per block on a rank; 0 if the rank has no layer."""
    return max((sum(spec.page_size_bytes for _, spec in layer_specs(group)) for group in groups), default=0)
