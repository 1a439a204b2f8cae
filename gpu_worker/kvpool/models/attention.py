"""Models with attention in all layers: full, in a sliding window, or in a chunk.

Windows and chunks follow `layer_types` if the config has it, otherwise the rule of the family's config class in
transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import AttentionSpec
from kvpool.core.specs.kinds import FP8_DS_MLA, ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from kvpool.models.context import Context, Layer, naming_layer

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"

_GEMMA_HEAD_SIZE: Final = 256
_LLAMA4_FULL_EVERY: Final = 4
GEMMA3_DEFAULTS: Final[Mapping[str, object]] = {
    "head_dim": 256,
    "hidden_size": 2304,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "vocab_size": 262_208,
}
"""Defaults of Gemma3TextConfig in transformers, which configs of Gemma 3 omit."""
_GEMMA3_FULL_EVERY: Final = 6


@dataclass(frozen=True, slots=True)
class Heads:
    """Properties that all attention layers of a model share, on one rank.

    Attributes:
        block_size: Tokens per block.
        num_kv_heads: Number of key and value heads on the rank.
        head_size: Elements per head.
        dtype: Element type.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str

    def full(self) -> FullAttentionSpec:
        """Spec of a layer with full attention."""
        return FullAttentionSpec(self.block_size, self.num_kv_heads, self.head_size, self.dtype)

    def sliding(self, window_tokens: int) -> SlidingWindowSpec:
        """Spec of a layer with a sliding window."""
        return SlidingWindowSpec(
            self.block_size, self.num_kv_heads, self.head_size, self.dtype, sliding_window=window_tokens
        )

    def chunked(self, chunk_tokens: int) -> ChunkedLocalAttentionSpec:
        """Spec of a layer with chunked attention."""
        return ChunkedLocalAttentionSpec(
            self.block_size, self.num_kv_heads, self.head_size, self.dtype, attention_chunk_size=chunk_tokens
        )


def heads_dtype(ctx: Context) -> str:
    """Element type of keys and values.

    Raises:
        InvalidArgumentError: The type is for latent vectors only.
    """
    if ctx.kv_dtype == FP8_DS_MLA:
        raise InvalidArgumentError("kv_dtype", f"{FP8_DS_MLA!r} is for multi-head latent attention only")
    return ctx.kv_dtype


def read_heads(
    ctx: Context,
    *,
    num_kv_heads: int = 0,
    head_size: int = 0,
    head_dim_key: str = "head_dim",
) -> Heads:
    """Reads the properties that all attention layers share.

    Args:
        ctx: The config.
        num_kv_heads: Number of key and value heads if the config omits it; 0 if it is required.
        head_size: Elements per head if the config omits it; 0 for hidden_size / num_attention_heads.
        head_dim_key: Key of the head size.
    """
    keys = ctx.keys
    heads = keys.dimension("num_attention_heads")
    ctx.shard("num_attention_heads", heads)
    kv_heads = ctx.shard_kv_heads("num_key_value_heads", keys.dimension("num_key_value_heads", num_kv_heads))
    if not keys.has(head_dim_key) and not head_size:
        hidden_size = keys.dimension("hidden_size")
        if hidden_size < heads:
            raise InvalidArgumentError(keys.field("hidden_size"), f"{hidden_size} is less than one for each head")
        head_size = hidden_size // heads
    return Heads(ctx.options.block_size, kv_heads, keys.dimension(head_dim_key, head_size), heads_dtype(ctx))


def layer_types(ctx: Context, count: int, known: Sequence[str]) -> list[str] | None:
    """Reads the kind of every layer from `layer_types`; None if the config does not have it.

    Raises:
        InvalidArgumentError: It has an unknown kind, or not one kind per layer.
    """
    if not ctx.keys.has("layer_types"):
        return None
    kinds = ctx.keys.texts("layer_types")
    where = ctx.keys.field("layer_types")
    if len(kinds) != count:
        raise InvalidArgumentError(where, f"names {len(kinds)} layers, not {count}")
    for i, kind in enumerate(kinds):
        if kind not in known:
            raise InvalidArgumentError(f"{where}[{i}]", f"{kind!r} is not known; known: {', '.join(known)}")
    return kinds


def attention_layers(ctx: Context, heads: Heads, kinds: Sequence[str]) -> list[Layer]:
    """Makes the layers of a decoder with attention in every layer.

    Args:
        ctx: The config; the window and chunk size are read if a layer needs them.
        heads: Properties that the layers share.
        kinds: FULL, SLIDING or CHUNKED per layer.
    """
    window = ctx.keys.tokens("sliding_window") if SLIDING in kinds else 0
    chunk = ctx.keys.tokens("attention_chunk_size") if CHUNKED in kinds else 0
    layers = []
    for i, kind in enumerate(kinds):
        name = f"model.layers.{i}.self_attn.attn"
        with naming_layer(name):
            spec: AttentionSpec
            if kind == SLIDING:
                spec = heads.sliding(window)
            elif kind == CHUNKED:
                spec = heads.chunked(chunk)
            else:
                spec = heads.full()
        layers.append(Layer(i, name, spec))
    return layers


def _count(ctx: Context) -> int:
    return ctx.keys.layers("num_hidden_layers")


def llama(ctx: Context) -> list[Layer]:
    """Llama 1 to 3: full attention; without num_key_value_heads, every query head has its own key and value head."""
    heads = read_heads(ctx, num_kv_heads=ctx.keys.dimension("num_attention_heads"))
    return attention_layers(ctx, heads, [FULL] * _count(ctx))


def mistral(ctx: Context) -> list[Layer]:
    """Mistral and Mixtral: a window on all layers or on none."""
    count = _count(ctx)
    kind = SLIDING if ctx.keys.has("sliding_window") else FULL
    kinds = layer_types(ctx, count, (FULL, SLIDING)) or [kind] * count
    return attention_layers(ctx, read_heads(ctx), kinds)


def qwen(ctx: Context) -> list[Layer]:
    """Qwen 2 to 3, dense or mixture of experts: an optional window from layer max_window_layers on."""
    count = _count(ctx)
    heads = read_heads(ctx)
    if not (ctx.keys.flag("use_sliding_window", default=False) and ctx.keys.has("sliding_window")):
        return attention_layers(ctx, heads, [FULL] * count)
    kinds = layer_types(ctx, count, (FULL, SLIDING))
    if kinds is None:
        first = ctx.keys.index("max_window_layers")
        kinds = [SLIDING if i >= first else FULL for i in range(count)]
    return attention_layers(ctx, heads, kinds)


def gemma(ctx: Context) -> list[Layer]:
    """Gemma 1: full attention."""
    return attention_layers(ctx, read_heads(ctx, head_size=_GEMMA_HEAD_SIZE), [FULL] * _count(ctx))


def gemma2(ctx: Context) -> list[Layer]:
    """Gemma 2: a window on every even layer."""
    count = _count(ctx)
    kinds = [FULL if i % 2 else SLIDING for i in range(count)]
    heads = read_heads(ctx, head_size=_GEMMA_HEAD_SIZE)
    return attention_layers(ctx, heads, layer_types(ctx, count, (FULL, SLIDING)) or kinds)


def gemma3(ctx: Context) -> list[Layer]:
    """Gemma 3: a window on all layers except every 6th, or as sliding_window_pattern states."""
    count = ctx.keys.layers("num_hidden_layers")
    pattern_key = "sliding_window_pattern" if ctx.keys.has("sliding_window_pattern") else "_sliding_window_pattern"
    every = ctx.keys.layers(pattern_key, _GEMMA3_FULL_EVERY)
    kinds = [SLIDING if (i + 1) % every else FULL for i in range(count)]
    return attention_layers(ctx, read_heads(ctx), layer_types(ctx, count, (FULL, SLIDING)) or kinds)


def gpt_oss(ctx: Context) -> list[Layer]:
    """gpt-oss: a window on every even layer. Its sinks are learned weights and take no blocks."""
    count = _count(ctx)
    kinds = [FULL if i % 2 else SLIDING for i in range(count)]
    return attention_layers(ctx, read_heads(ctx), layer_types(ctx, count, (FULL, SLIDING)) or kinds)


def llama4(ctx: Context) -> list[Layer]:
    """Llama 4: chunks on the layers with rotary embedding, full attention on those without (by default every 4th)."""
    count = _count(ctx)
    rotary = ctx.keys.integers("no_rope_layers") if ctx.keys.has("no_rope_layers") else []
    if rotary and len(rotary) != count:
        raise InvalidArgumentError(ctx.keys.field("no_rope_layers"), f"names {len(rotary)} layers, not {count}")
    every = ctx.keys.layers("no_rope_layer_interval", _LLAMA4_FULL_EVERY)
    rotary = rotary or [(i + 1) % every for i in range(count)]
    local = CHUNKED if ctx.keys.has("attention_chunk_size") else FULL
    kinds = [local if uses else FULL for uses in rotary]
    return attention_layers(ctx, read_heads(ctx), layer_types(ctx, count, (FULL, CHUNKED)) or kinds)
