"""How long a request may be: what a config states, stretched by its rotary scaling."""

import math
from typing import Final

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_TOKENS
from kvpool.models.reader import Reader, typed

_SCALING_KEYS: Final = ("rope_scaling", "rope_parameters")
_STRETCHING: Final = ("linear", "dynamic", "yarn")
"""Kinds of scaling that lengthen; others (llama3, longrope, mrope) are counted in the stated length already."""


def stated_length(keys: Reader, key: str, notes: list[str], *, counts_scaling: bool) -> int:
    """Most tokens that the model is made for, as vLLM works it out.

    Args:
        keys: The config's part on the language model.
        key: States the length.
        notes: Remarks; a stretched length is told.
        counts_scaling: The stated length counts the scaling already.
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
            notes.append(f"{scaling.path} differs by kind of layer and is not counted: say max_model_len")
        if kind not in _STRETCHING or not scaling.has("factor"):
            continue
        base_key = "original_max_position_embeddings"
        base = scaling.tokens(base_key) if kind == "yarn" and scaling.has(base_key) else length
        stretched = check_range(scaling.field("factor"), int(base * _factor(scaling)), 1, MAX_TOKENS)
        if stretched != length:
            notes.append(f"{scaling.field('factor')} stretches {base} tokens to {stretched}")
        return stretched
    return length


def _factor(scaling: Reader) -> float:
    value = scaling.values["factor"]
    field = scaling.field("factor")
    factor = float(value) if isinstance(value, int) and not isinstance(value, bool) else typed(field, value, float)
    if not math.isfinite(factor) or not 0 < factor <= MAX_TOKENS:
        raise InvalidArgumentError(field, f"{factor} is not in (0, {MAX_TOKENS}]")
    return factor
