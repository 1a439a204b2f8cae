"""Grouping of layers: layers of a group share block tables, and blocks of all groups have the same size in bytes.

1. All blocks of a pool have one size: (layers of the largest group) x (page size) bytes. Therefore all pages are made
   equally large, and groups get the same number of layers where possible.
2. Padding fills the differences: pages whose sizes do not divide each other, and groups with fewer layers than the
   largest. `KVCacheConfig.padding_bytes_per_block` reports the padding.
3. Layers of one kind that differ only in hidden size need no padding. They form one group, with a tensor of its own
   size for each layer.

Source: the grouping follows vLLM's kv_cache_utils. The padding of pages whose sizes do not divide each other is ours.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import AttentionSpec, KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvpool.core.specs.pool_config import KVCacheGroup

Layers = Mapping[str, KVCacheSpec]

_IMBALANCE = 1.25
"""Ratio of the largest to the smallest number of layers per kind up to which the largest sets the group size: a few
layers of padding cost less than many more groups."""


def group_layers(layers: Layers, *, hybrid: bool) -> tuple[KVCacheGroup, ...]:
    """Groups the layers of a whole model.

    Args:
        layers: Spec of each layer, in the order of the model. Encoder-only layers store nothing and are left out.
        hybrid: Whether kinds may be managed separately. If not, window layers are managed as full attention; their
            specs keep the window size.

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
    values = asdict(spec)
    values.pop("extra_retained_tokens", None)  # all tokens are retained
    return (MLAAttentionSpec if spec.is_latent else FullAttentionSpec)(**values)  # they have the other fields of all


def _with_one_page_size(layers: Layers) -> Layers:
    largest = max(spec.page_size_bytes for spec in layers.values())
    return {
        name: spec if spec.page_size_bytes == largest else spec.with_page_size(largest) for name, spec in layers.items()
    }


def _groups_of_one_size(layers: Layers) -> tuple[KVCacheGroup, ...]:
    """Groups layers with equal specs, with the same number of layers per group where possible.

    Each group takes every n-th layer, not n consecutive ones, so that each pipeline stage has layers of every group.
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
