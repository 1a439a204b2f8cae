"""Models whose layers all attend: which of them look at everything, at a window, or at a chunk.

Windows and chunks follow `layer_types` where a config has it, and otherwise the rule of the family's config class in
transformers.
"""

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Heads:
    """What all attention layers of a model have in common, on one rank.

    Attributes:
        block_size: Tokens a block holds.
        num_kv_heads: Key and value heads on the rank.
        head_size: Elements of a head.
        dtype: Element type.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str

    def full(self) -> FullAttentionSpec:
        """A layer that looks at everything."""
        return FullAttentionSpec(self.block_size, self.num_kv_heads, self.head_size, self.dtype)

    def sliding(self, window_tokens: int) -> SlidingWindowSpec:
        """A layer that looks at a window."""
        return SlidingWindowSpec(
            self.block_size, self.num_kv_heads, self.head_size, self.dtype, sliding_window=window_tokens
        )

    def chunked(self, chunk_tokens: int) -> ChunkedLocalAttentionSpec:
        """A layer that looks at its own chunk."""
        return ChunkedLocalAttentionSpec(
            self.block_size, self.num_kv_heads, self.head_size, self.dtype, attention_chunk_size=chunk_tokens
        )


def heads_dtype(ctx: Context) -> str:
    """Element type of keys and values.

    Raises:
        InvalidArgumentError: It is that of latent vectors.
    """
    if ctx.kv_dtype == FP8_DS_MLA:
        raise InvalidArgumentError("kv_dtype", f"{FP8_DS_MLA!r} is of multi-head latent attention only")
    return ctx.kv_dtype


def read_heads(
    ctx: Context,
    *,
    num_kv_heads: int = 0,
    head_size: int = 0,
    head_dim_key: str = "head_dim",
) -> Heads:
    """Reads what all attention layers have in common.

    Args:
        ctx: The config.
        num_kv_heads: Key and value heads where the config leaves them out; 0 if it must not.
        head_size: Elements of a head where it does; 0 for hidden_size / num_attention_heads.
        head_dim_key: The key that states it.
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
    """The kind of every layer, as `layer_types` states it; None where the config does not have it.

    Raises:
        InvalidArgumentError: It names other kinds, or is not one for each layer.
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
    """Makes the layers of a decoder whose every layer attends.

    Args:
        ctx: The config; the window and the chunk are read where a layer has one.
        heads: What they have in common.
        kinds: FULL, SLIDING or CHUNKED for each.
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
    """Llama 1 to 3: full attention; without num_key_value_heads, each head has its own."""
    heads = read_heads(ctx, num_kv_heads=ctx.keys.dimension("num_attention_heads"))
    return attention_layers(ctx, heads, [FULL] * _count(ctx))


def mistral(ctx: Context) -> list[Layer]:
    """Mistral and Mixtral: a window on all layers, or on none."""
    count = _count(ctx)
    kind = SLIDING if ctx.keys.has("sliding_window") else FULL
    kinds = layer_types(ctx, count, (FULL, SLIDING)) or [kind] * count
    return attention_layers(ctx, read_heads(ctx), kinds)


def qwen(ctx: Context) -> list[Layer]:
    """Qwen 2 to 3, dense or of experts: a window, if it is used at all, from layer max_window_layers on."""
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


def gpt_oss(ctx: Context) -> list[Layer]:
    """gpt-oss: a window on every even layer. Its sinks are learned weights, and take no blocks."""
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
