"""Maximum request length: the length in a config, extended by rotary scaling."""

import math
from typing import Final

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_TOKENS
from kvpool.models.reader import Reader, typed

_SCALING_KEYS: Final = ("rope_scaling", "rope_parameters")
_EXTENDING: Final = ("linear", "dynamic", "yarn")
"""Scaling kinds that extend the length; the stated length already includes others (llama3, longrope, mrope)."""


def stated_length(keys: Reader, key: str, notes: list[str], *, counts_scaling: bool) -> int:
    """Maximum number of tokens that the model supports, computed as in vLLM.

    Args:
        keys: The language model's section of the config.
        key: Key of the length.
        notes: Notes; an extended length adds one.
        counts_scaling: Whether the stated length already includes the scaling.
    """
    length = keys.tokens(key)
    if counts_scaling:
        return length
    for name in _SCALING_KEYS:
        if not keys.has(name):
            continue
        scaling = keys.section(name)
        kind = next((scaling.text(k) for k in ("rope_type", "type") if scaling.has(k)), "")
        if not kind and any(isinstance(value, dict) for value in scaling.values.values()):
            notes.append(f"{scaling.path} differs by layer kind and is not counted: set max_model_len")
        if kind not in _EXTENDING or not scaling.has("factor"):
            continue
        base_key = "original_max_position_embeddings"
        base = scaling.tokens(base_key) if kind == "yarn" and scaling.has(base_key) else length
        extended = check_range(scaling.field("factor"), int(base * _factor(scaling)), 1, MAX_TOKENS)
        if extended != length:
            notes.append(f"{scaling.field('factor')} extends {base} tokens to {extended}")
        return extended
    return length


def _factor(scaling: Reader) -> float:
    value = scaling.values["factor"]
    field = scaling.field("factor")
    factor = float(value) if isinstance(value, int) and not isinstance(value, bool) else typed(field, value, float)
    if not math.isfinite(factor) or not 0 < factor <= MAX_TOKENS:
        raise InvalidArgumentError(field, f"{factor} is not in (0, {MAX_TOKENS}]")
    return factor
