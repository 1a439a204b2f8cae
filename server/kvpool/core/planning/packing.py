"""Grouping of layers whose pages lie side by side in a block, so that pages of several sizes need no padding.

1. Layers that allocate alike share a group, whatever the sizes of their pages.
2. A block is as large as the pages of the widest group. Groups are split so that they fill a block about equally: by
   the repeats of a pattern of layers where a group has one, states and windows by what fits beside the widest.

Source: vLLM 0.32's `_get_packed_kv_cache_groups`, except that it loses layers of a kind whose page sizes have different
numbers of layers where it splits them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import CircularBufferSpec, MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
from kvpool.core.specs.pool_config import KVCacheGroup


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers that allocate alike.

    Attributes:
        layers: Their specs, in the order of the model.
        by_page: Their names, by the size of their pages in bytes.
    """

    layers: Mapping[str, KVCacheSpec]
    by_page: Mapping[int, Sequence[str]]

    @property
    def first(self) -> KVCacheSpec:
        return next(iter(self.layers.values()))

    @property
    def num_repeats(self) -> int:
        """Layers of the page size that most have: repeats of the pattern of layers, if there is one."""
        return max(map(len, self.by_page.values()))

    @property
    def is_pattern(self) -> bool:
        """Whether each page size has equally many layers."""
        return len(set(map(len, self.by_page.values()))) == 1

    def widest_bytes(self, num_groups: int) -> int:
        """Bytes of the pages of the widest group, if the layers form `num_groups`."""
        return sum(-(-len(names) // num_groups) * page for page, names in self.by_page.items())

    def groups(self, num_groups: int) -> list[KVCacheGroup]:
        """Splits the layers, by repeats of the pattern if there is one."""
        units = list(zip(*self.by_page.values(), strict=True)) if self.is_pattern else [(name,) for name in self.layers]
        if num_groups == 1:
            units = [tuple(self.layers)]
        return [self._group([name for unit in units[i::num_groups] for name in unit]) for i in range(num_groups)]

    def _group(self, names: Sequence[str]) -> KVCacheGroup:
        layers = tuple((name, self.layers[name]) for name in names)
        return KVCacheGroup(UniformTypeKVCacheSpecs(self.first.block_size, layers), tuple(names))


def pack_layers(layers: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Groups layers whose pages have several sizes; empty if all have one size, which needs no packing."""
    if len({spec.page_size_bytes for spec in layers.values()}) == 1:
        return ()
    kinds = _kinds(layers)
    repeats = _repeats_per_group(kinds)
    counts = [
        -(-kind.num_repeats // repeats) if repeats and kind.is_pattern else 1 for kind in kinds
    ]  # groups of each kind
    narrow = [_is_narrow(kind.first, repeats) for kind in kinds]
    widest_bytes = max(
        kind.widest_bytes(len(kind.layers) if is_narrow else count)
        for kind, count, is_narrow in zip(kinds, counts, narrow, strict=True)
    )
    groups: list[KVCacheGroup] = []
    for kind, count, is_narrow in zip(kinds, counts, narrow, strict=True):
        fitting = max(widest_bytes // kind.first.page_size_bytes, 1)
        groups += kind.groups(max(count, -(-len(kind.layers) // fitting)) if is_narrow else count)
    return tuple(groups)


def _kinds(layers: Mapping[str, KVCacheSpec]) -> list[_Kind]:
    alike: list[dict[str, KVCacheSpec]] = []
    for name, spec in layers.items():
        own = next((known for known in alike if next(iter(known.values())).allocates_like(spec)), None)
        if own is None:
            own = {}
            alike.append(own)
        own[name] = spec
    return [_Kind(own, _by_page(own)) for own in alike]


def _by_page(layers: Mapping[str, KVCacheSpec]) -> Mapping[int, Sequence[str]]:
    found: dict[int, list[str]] = {}
    for name, spec in layers.items():
        found.setdefault(spec.page_size_bytes, []).append(name)
    return found


def _repeats_per_group(kinds: Sequence[_Kind]) -> int:
    """Repeats of a pattern in a group, with the least padding; 0 if no kind has a pattern of several page sizes."""
    patterns = [kind for kind in kinds if kind.is_pattern]
    least = max((kind.num_repeats for kind in patterns if len(kind.by_page) > 1), default=0)
    if not least:
        return 0
    numbers = [kind.num_repeats for kind in patterns]
    return min(range(least, max(numbers) + 1), key=lambda size: (sum(-number % size for number in numbers), -size))


def _is_narrow(spec: KVCacheSpec, repeats: int) -> bool:
    """Whether groups of such layers can have as few layers as fit beside the others."""
    return isinstance(spec, MambaSpec | CircularBufferSpec) or (not repeats and isinstance(spec, SlidingWindowSpec))


def block_offsets(layers: Sequence[tuple[str, KVCacheSpec]]) -> dict[str, int]:
    """Returns where the page of each layer of a group begins in a block, in bytes: equal layers one after the other."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers:
        by_spec.setdefault(spec, []).append(name)
    offsets: dict[str, int] = {}
    end = 0
    for spec, names in by_spec.items():
        for name in names:
            offsets[name] = end
            end += spec.page_size_bytes
    return offsets
