"""Maximum request length: the length in a config, extended by rotary scaling as in vLLM 0.32."""

import math
from collections.abc import Iterator
from typing import Final

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_TOKENS
from kvpool.models.family import Family
from kvpool.models.reader import Reader, typed

_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Keys of the length; the smallest counts."""
_OVERRIDE: Final = "model_max_length"
_SCALING_KEYS: Final = ("rope_scaling", "rope_parameters")
_COUNTED: Final = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Scaling kinds that the stated length already includes."""


def stated_length(keys: Reader, family: Family, notes: list[str]) -> int:
    """Maximum number of tokens that the model supports.

    Args:
        keys: The language model's section of the config.
        family: Rules of the architecture.
        notes: Notes; an extended or assumed length adds one.
    """
    present = [key for key in _KEYS if keys.has(key)]
    if not present and family.assumed_length:
        notes.append(f"the config states no {family.length_key}; {family.assumed_length} is assumed")
        return family.assumed_length
    length = min((keys.tokens(key) for key in present), default=0) or keys.tokens(family.length_key)
    if keys.has(_OVERRIDE):
        length = keys.tokens(_OVERRIDE)
    return length if family.length_counts_scaling else _scaled(keys, length, notes)


def _scaled(keys: Reader, length: int, notes: list[str]) -> int:
    for scaling in _scalings(keys):
        kind = next((scaling.text(key) for key in ("rope_type", "type") if scaling.has(key)), "")
        original = "original_max_position_embeddings"
        if kind == "longrope" and keys.has(original):
            notes.append(f"{keys.field(original)} is the length with this rotary scaling; max_model_len may extend it")
            return keys.tokens(original)
        if kind in _COUNTED or not kind or not scaling.has("factor"):
            continue
        extended = check_range(scaling.field("factor"), int(length * _factor(scaling)), 1, MAX_TOKENS)
        if extended != length:
            notes.append(f"{scaling.field('factor')} extends {length} tokens to {extended}")
        return extended
    return length


def _scalings(keys: Reader) -> Iterator[Reader]:
    """Yields the scaling of all layers, or that of each kind of layers; vLLM takes one for all."""
    for name in _SCALING_KEYS:
        if keys.has(name):
            scaling = keys.section(name)
            yield scaling
            yield from (scaling.section(key) for key, value in scaling.values.items() if isinstance(value, dict))


def _factor(scaling: Reader) -> float:
    value = scaling.value("factor")
    field = scaling.field("factor")
    factor = float(value) if isinstance(value, int) and not isinstance(value, bool) else typed(field, value, float)
    if not math.isfinite(factor) or not 0 < factor <= MAX_TOKENS:
        raise InvalidArgumentError(field, f"{factor} is not in (0, {MAX_TOKENS}]")
    return factor
