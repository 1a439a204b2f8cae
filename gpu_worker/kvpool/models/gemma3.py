"""Gemma 3, whose configs leave out what equals the defaults of its config class in transformers (Gemma3TextConfig)."""

from collections.abc import Mapping
from typing import Final

from kvpool.models.attention import FULL, SLIDING, attention_layers, layer_types, read_heads
from kvpool.models.context import Context, Layer

DEFAULTS: Final[Mapping[str, object]] = {
    "head_dim": 256,
    "hidden_size": 2304,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "vocab_size": 262_208,
}
_FULL_EVERY: Final = 6


def gemma3(ctx: Context) -> list[Layer]:
    """A window on all layers but every 6th, or as sliding_window_pattern has it."""
    count = ctx.keys.layers("num_hidden_layers")
    pattern_key = "sliding_window_pattern" if ctx.keys.has("sliding_window_pattern") else "_sliding_window_pattern"
    every = ctx.keys.layers(pattern_key, _FULL_EVERY)
    kinds = [SLIDING if (i + 1) % every else FULL for i in range(count)]
    return attention_layers(ctx, read_heads(ctx), layer_types(ctx, count, (FULL, SLIDING)) or kinds)
