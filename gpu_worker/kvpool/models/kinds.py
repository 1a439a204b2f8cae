"""Kinds of a decoder's layers: what its config says, else what its family does."""

from collections.abc import Mapping, Sequence
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.models.family import Family
from kvpool.models.reader import Reader

FULL: Final = "full attention"
SLIDING: Final = "a sliding window"
CHUNKED: Final = "chunks"
STATE: Final = "a state"
BOTH: Final = "full attention and a state"
NONE: Final = "nothing"
ATTENDING: Final = (FULL, SLIDING, CHUNKED, BOTH)

LETTERS: Final = {"F": FULL, "S": SLIDING, "C": CHUNKED, "L": STATE, "B": BOTH}
"""Kinds in `Family.cycle`."""
_LISTS: Final = ("layers_block_type", "layer_types")
"""Keys that name the kind of every layer."""
NAMES: Final = {
    "full_attention": FULL,
    "attention": FULL,
    "indexed_attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": STATE,
    "mamba": STATE,
    "conv": STATE,
    "hybrid": BOTH,
    "mlp": NONE,
    "moe": NONE,
}
"""Kinds by their names in configs."""
_PATTERN: Final = {"M": STATE, "*": FULL, "-": NONE, "E": NONE}
"""Letters of `hybrid_override_pattern`."""


def read_kinds(keys: Reader, family: Family) -> list[str]:
    """Reads the kind of every decoder layer.

    Raises:
        InvalidArgumentError: A kind is not known, or a list has not one kind per layer.
    """
    uses_windows = _uses_windows(keys)
    kinds = _listed(keys) or _repeated(keys, family)
    return kinds if uses_windows else [FULL if kind == SLIDING else kind for kind in kinds]


def _listed(keys: Reader) -> list[str]:
    """Kinds that the config lists; empty if it lists none."""
    for key in _LISTS:
        if keys.has(key):
            return _of_length(keys, key, _named(keys.field(key), keys.texts(key), NAMES))
    if keys.has(key := "hybrid_override_pattern"):
        return _of_length(keys, key, _named(keys.field(key), keys.text(key), _PATTERN))
    if keys.has(key := "hybrid_layer_pattern"):
        return _of_length(keys, key, [SLIDING if is_local else FULL for is_local in keys.integers(key)])
    return []


def _repeated(keys: Reader, family: Family) -> list[str]:
    """Kinds by the numbers of the layers."""
    if family.kinds_key:
        keys.value(family.kinds_key)  # fails if it is absent
    count = keys.layers("num_hidden_layers")
    if keys.has("attn_layer_indices"):
        return _chosen(keys, count)
    if cycle := _cycle(keys, family):
        return [cycle[i % len(cycle)] for i in range(count)]
    first = keys.index("max_window_layers", 0) if keys.has("sliding_window") else count
    return [SLIDING if i >= first else FULL for i in range(count)]


def _named(where: str, names: Sequence[str], known: Mapping[str, str]) -> list[str]:
    for i, name in enumerate(names):
        if name not in known:
            raise InvalidArgumentError(f"{where}[{i}]", f"{name!r} is not known; known: {', '.join(known)}")
    return [known[name] for name in names]


def _of_length(keys: Reader, key: str, kinds: list[str]) -> list[str]:
    """Checks the length of a list, which may go on with the layers of a draft model."""
    count = keys.layers("num_hidden_layers", len(kinds))
    if key == "layers_block_type" or len(kinds) == count:  # as in transformers, that key counts the layers
        return kinds
    if len(kinds) == count + keys.index("num_nextn_predict_layers", 0):
        return kinds[:count]
    raise InvalidArgumentError(keys.field(key), f"names {len(kinds)} layers, not {count}")


def _chosen(keys: Reader, count: int) -> list[str]:
    attend = keys.integers("attn_layer_indices")
    for i, index in enumerate(attend):
        if index >= count:
            where = f"{keys.field('attn_layer_indices')}[{i}]"
            raise InvalidArgumentError(where, f"{index} is not in [0, {count})")
    return [FULL if i in set(attend) else STATE for i in range(count)]


def _cycle(keys: Reader, family: Family) -> list[str]:
    """Kinds of the first layers, which repeat; empty if neither the config nor the family states any."""
    if keys.has("attn_layer_period"):
        period, offset = keys.layers("attn_layer_period"), keys.index("attn_layer_offset")
        if offset >= period:
            raise InvalidArgumentError(keys.field("attn_layer_offset"), f"{offset} is not in [0, {period})")
        return [FULL if i == offset else STATE for i in range(period)]
    if keys.has("full_attention_interval"):
        return [STATE] * (keys.layers("full_attention_interval") - 1) + [FULL]
    if keys.has("sliding_window_pattern"):
        pattern = keys.value("sliding_window_pattern")
        if isinstance(pattern, str):
            return [SLIDING if letter == "L" else FULL for letter in pattern]
        return [SLIDING] * (keys.layers("sliding_window_pattern") - 1) + [FULL]
    return [LETTERS[letter] for letter in family.cycle]


def _uses_windows(keys: Reader) -> bool:
    """Whether the config uses its window; a window of 0 stands for none, as in vLLM."""
    is_zero = keys.has("sliding_window") and keys.value("sliding_window") == 0
    return keys.flag("use_sliding_window", default=True) and not is_zero
