"""Sorts layers into groups that share block tables, so that every block takes the same bytes whoever gets it.

1. The pool gives blocks of one size: a block of any group takes (layers of the largest group) x (page) bytes. So all
   pages are made equally large, and groups are filled to equally many layers as far as that goes.
2. What cannot be equal is padded: pages that do not divide each other, groups with fewer layers than the largest. The
   padding is not hidden: see `KVCacheConfig.padding_bytes_per_block`.
3. Layers of one kind that differ in hidden size alone need neither: they make one group, with tensors of their sizes.

Source: the grouping is that of vLLM's kv_cache_utils, and pages that do not divide each other come on top.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import AttentionSpec, KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvpool.core.specs.pool_config import KVCacheGroup

Layers = Mapping[str, KVCacheSpec]

_IMBALANCE = 1.25
"""Up to this ratio of the most to the fewest layers of a kind, the most decides: a few layers of padding cost less
than many more groups."""


def group_layers(layers: Layers, *, hybrid: bool) -> tuple[KVCacheGroup, ...]:
    """Sorts the layers of a whole model into groups.

    Args:
        layers: Spec of each layer, in the model's order. Encoder-only layers keep nothing and are left out.
        hybrid: Whether kinds may be managed apart; if not, windows become full attention that remembers its window.

    Returns:
        The groups; none for a model without a cache.

    Raises:
        InvalidArgumentError: `hybrid` is false, and the layers cannot be managed as one kind.
    """
    kept = {name: spec for name, spec in layers.items() if not isinstance(spec, EncoderOnlyAttentionSpec)}
    if not kept:
        return ()
    whole = _as_one_group(kept)
    if not whole and not hybrid:
        kept = {name: _remember_window(spec) for name, spec in kept.items()}
        whole = _as_one_group(kept)
        if not whole:
            kinds = sorted({type(spec).__name__ for spec in kept.values()})
            raise InvalidArgumentError(
                "disable_hybrid_kv_cache_manager", f"{', '.join(kinds)} cannot be managed as one kind"
            )
    return whole or _groups_of_one_size(_with_one_page_size(kept))


def _as_one_group(layers: Layers) -> tuple[KVCacheGroup, ...]:
    first, *others = layers.values()
    merged = first.merged_with(others)
    if merged:
        return (KVCacheGroup(merged, tuple(layers)),)
    if all(first.allocates_like(other) for other in others):
        return (KVCacheGroup(UniformTypeKVCacheSpecs(first.block_size, tuple(layers.items())), tuple(layers)),)
    return ()


def _remember_window(spec: KVCacheSpec) -> KVCacheSpec:
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    return FullAttentionSpec(
        spec.block_size,
        spec.num_kv_heads,
        spec.head_size,
        spec.dtype,
        spec.head_size_v,
        spec.page_size_padded,
        sliding_window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0,
        attention_chunk_size=spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 0,
    )


def _with_one_page_size(layers: Layers) -> Layers:
    largest = max(spec.page_size_bytes for spec in layers.values())
    return {
        name: spec if spec.page_size_bytes == largest else spec.with_page_size(largest) for name, spec in layers.items()
    }


def _groups_of_one_size(layers: Layers) -> tuple[KVCacheGroup, ...]:
    """Groups layers with equal specs, equally many in each group where that goes.

    Each group takes every n-th layer rather than n in a row: then every pipeline stage has its part of each group.
    """
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        by_spec.setdefault(spec, []).append(name)
    counts = [len(names) for names in by_spec.values()]
    group_size = max(counts) if max(counts) < min(counts) * _IMBALANCE else min(counts)
    groups = []
    for spec, names in by_spec.items():
        num_groups = -(-len(names) // group_size)
        groups += [KVCacheGroup(spec, tuple(names[i::num_groups])) for i in range(num_groups)]
    return tuple(groups)


def groups_on_rank(groups: tuple[KVCacheGroup, ...], layers: Layers) -> tuple[KVCacheGroup, ...]:
    """The groups with the layers that one rank has.

    Groups without any stay as they are, but for the names: their blocks are taken all the same.
    """
    return tuple(_group_of_rank(group, tuple(name for name in group.layer_names if name in layers)) for group in groups)


def _group_of_rank(group: KVCacheGroup, names: tuple[str, ...]) -> KVCacheGroup:
    spec = group.spec
    if isinstance(spec, UniformTypeKVCacheSpecs) and names:
        own = set(names)
        spec = replace(spec, layers=tuple(layer for layer in spec.layers if layer[0] in own))
    return KVCacheGroup(spec, names)


def layer_specs(group: KVCacheGroup) -> tuple[tuple[str, KVCacheSpec], ...]:
    """The group's layers, each with its own spec."""
    if isinstance(group.spec, UniformTypeKVCacheSpecs):
        own = dict(group.spec.layers)
        return tuple((name, own[name]) for name in group.layer_names)
    return tuple((name, group.spec) for name in group.layer_names)


def undeclared_field(spec: KVCacheSpec) -> str:
    """Names a size that planning needs and the spec leaves open; empty if it has all."""
    if spec.content_size_bytes:
        return ""
    if not isinstance(spec, AttentionSpec):
        return "shapes"
    return next((name for name in ("num_kv_heads", "head_size", "dtype") if not getattr(spec, name)), "head_size_v")


def block_size_bytes(groups: tuple[KVCacheGroup, ...]) -> int:
    """Bytes that a block takes on a rank; 0 if the rank has no layer."""
    if is_uniform_type(groups):
        return groups[0].spec.page_size_bytes if groups[0].layer_names else 0
    return max((len(group.layer_names) * group.spec.page_size_bytes for group in groups), default=0)


def is_uniform_type(groups: Sequence[KVCacheGroup]) -> bool:
    """Whether all layers are of one kind, with pages of different sizes: each has a tensor of its own."""
    return len(groups) == 1 and isinstance(groups[0].spec, UniformTypeKVCacheSpecs)
