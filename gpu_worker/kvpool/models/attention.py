"""Models with attention in all layers: full, in a sliding window, or in a chunk.

Windows and chunks follow `layer_types` if the config has it, otherwise the rule of the family's config class in
transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import AttentionSpec, KVCacheSpec
from kvpool.core.specs.kinds import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from kvpool.models.context import Context, Layer, make_layer
from kvpool.models.packing import PACKINGS, head_content_bytes

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"

_NUM_ENDS: Final = 2
"""Number of layers at each end that keep the model's type, where the packed type asks for it."""
_KERNEL_BLOCK: Final = 16
"""Tokens of the smallest block of vLLM's attention kernels."""
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

_AttentionT = TypeVar("_AttentionT", bound=AttentionSpec)


@dataclass(frozen=True, slots=True)
class Heads:
    """Properties that all attention layers of a model share, on one rank.

    Attributes:
        block_size: Tokens per block.
        num_kv_heads: Number of key and value heads on the rank.
        head_size: Elements per head.
        dtype: Element type.
        num_head_slots: See `AttentionSpec`.
        state_content_bytes: See `AttentionSpec`.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    num_head_slots: int = 0
    state_content_bytes: int = 0

    def spec(self, kind: type[_AttentionT], **own: int) -> _AttentionT:
        """Spec of a layer.

        Args:
            kind: Kind of attention.
            own: Attributes that only this kind has.
        """
        own = {"num_head_slots": self.num_head_slots, "state_content_bytes": self.state_content_bytes, **own}
        return kind(self.block_size, self.num_kv_heads, self.head_size, self.dtype, **own)

    def full(self) -> FullAttentionSpec:
        """Spec of a layer with full attention."""
        return self.spec(FullAttentionSpec)


def make_heads(ctx: Context, num_kv_heads: int, head_size: int) -> Heads:
    """Makes the properties of heads of the requested type.

    Raises:
        InvalidArgumentError: The type is for latent vectors only, or not for heads of this size.
    """
    block_size, packing = ctx.options.block_size, PACKINGS.get(ctx.kv_dtype)
    if packing is None:
        return Heads(block_size, num_kv_heads, head_size, ctx.kv_dtype)
    content_bytes = head_content_bytes(ctx.kv_dtype, head_size)
    num_slots = packing.num_slots * num_kv_heads if packing.num_slots > 1 else 0
    note = f"kv_dtype {ctx.kv_dtype}: {packing.num_slots * content_bytes} bytes per token and head, as vLLM packs them"
    if note not in ctx.notes:
        ctx.notes.append(note)
    return Heads(block_size, num_kv_heads, head_size, packing.dtype, num_slots, content_bytes)


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
        head_size = elements_per_head(ctx, "hidden_size", heads)
    return make_heads(ctx, kv_heads, keys.dimension(head_dim_key, head_size))


def elements_per_head(ctx: Context, width_key: str, heads: int) -> int:
    """Divides the width of a layer over its heads.

    Raises:
        InvalidArgumentError: There are more heads than elements.
    """
    width = ctx.keys.dimension(width_key)
    if width < heads:
        raise InvalidArgumentError(ctx.keys.field(width_key), f"{width} is less than one for each head")
    return width // heads


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

    def make_spec(heads: Heads, kind: str) -> KVCacheSpec:
        if kind == FULL:
            return heads.full()
        if kind == SLIDING:
            return heads.spec(SlidingWindowSpec, sliding_window=window)
        return heads.spec(ChunkedLocalAttentionSpec, attention_chunk_size=chunk)

    heads, ends = _ends_in_model_dtype(ctx, heads)
    num_ends = min(_NUM_ENDS, len(kinds) // 2)
    layers = []
    for i, kind in enumerate(kinds):
        own = heads if num_ends <= i < len(kinds) - num_ends else ends
        layers.append(make_layer(i, f"model.layers.{i}.self_attn.attn", partial(make_spec, own, kind)))
    return layers


def _ends_in_model_dtype(ctx: Context, heads: Heads) -> tuple[Heads, Heads]:
    """Returns the heads of the layers, and those of the first and last layers, which may keep the model's type.

    Blocks of both have the same number of tokens. As in vLLM, a page of packed layers is at least as large as
    _KERNEL_BLOCK tokens in the model's type.
    """
    packing = PACKINGS.get(ctx.kv_dtype)
    if packing is None or not packing.keeps_ends:
        return heads, heads
    ends = replace(heads, dtype=ctx.model_dtype, num_head_slots=0, state_content_bytes=0)
    least_bytes = ends.full().state_size_bytes * _KERNEL_BLOCK
    step = max(_KERNEL_BLOCK, heads.block_size)
    block_size = max(heads.block_size, step * -(-least_bytes // (step * heads.full().state_size_bytes)))
    ctx.notes.append(
        f"kv_dtype {ctx.kv_dtype}: the first {_NUM_ENDS} and the last {_NUM_ENDS} layers keep {ctx.model_dtype}; blocks"
        f" have {block_size} tokens"
    )
    return replace(heads, block_size=block_size), replace(ends, block_size=block_size)


def _mixed_layers(ctx: Context, heads: Heads, local: str, is_local: Callable[[int], object]) -> list[Layer]:
    """Makes the layers of a decoder with two kinds of attention.

    Args:
        ctx: The config; its `layer_types` apply if it has them.
        heads: Properties that the layers share.
        local: The kind beside FULL.
        is_local: The family's rule: whether the layer with this number is local.
    """
    count = _count(ctx)
    kinds = layer_types(ctx, count, (FULL, local))
    if kinds is None:
        kinds = [local if is_local(i) else FULL for i in range(count)]
    return attention_layers(ctx, heads, kinds)


def _count(ctx: Context) -> int:
    return ctx.keys.layers("num_hidden_layers")


def llama(ctx: Context) -> list[Layer]:
    """Llama 1 to 3, GLM-4, MiniMax-M2: full attention; without num_key_value_heads, one for each query head."""
    return attention_layers(ctx, _optional_kv_heads(ctx), [FULL] * _count(ctx))


def phi(ctx: Context) -> list[Layer]:
    """Phi-3 and 4: heads as in Llama, and a window on all layers or on none."""
    return _mixed_layers(ctx, _optional_kv_heads(ctx), SLIDING, lambda _: ctx.keys.has("sliding_window"))


def _optional_kv_heads(ctx: Context) -> Heads:
    return read_heads(ctx, num_kv_heads=ctx.keys.dimension("num_attention_heads"))


def mistral(ctx: Context) -> list[Layer]:
    """Mistral and Mixtral: a window on all layers or on none."""
    return _mixed_layers(ctx, read_heads(ctx), SLIDING, lambda _: ctx.keys.has("sliding_window"))


def qwen(ctx: Context) -> list[Layer]:
    """Qwen 2 to 3, dense or mixture of experts: an optional window from layer max_window_layers on."""
    heads = read_heads(ctx)
    if not (ctx.keys.flag("use_sliding_window", default=False) and ctx.keys.has("sliding_window")):
        return attention_layers(ctx, heads, [FULL] * _count(ctx))
    return _mixed_layers(ctx, heads, SLIDING, lambda i: i >= ctx.keys.index("max_window_layers"))


def gemma(ctx: Context) -> list[Layer]:
    """Gemma 1: full attention."""
    return attention_layers(ctx, read_heads(ctx, head_size=_GEMMA_HEAD_SIZE), [FULL] * _count(ctx))


def gemma2(ctx: Context) -> list[Layer]:
    """Gemma 2: a window on every even layer."""
    return _mixed_layers(ctx, read_heads(ctx, head_size=_GEMMA_HEAD_SIZE), SLIDING, lambda i: i % 2 == 0)


def gemma3(ctx: Context) -> list[Layer]:
    """Gemma 3: a window on all layers except every 6th, or as sliding_window_pattern states."""
    pattern_key = "sliding_window_pattern" if ctx.keys.has("sliding_window_pattern") else "_sliding_window_pattern"
    every = ctx.keys.layers(pattern_key, _GEMMA3_FULL_EVERY)
    return _mixed_layers(ctx, read_heads(ctx), SLIDING, lambda i: (i + 1) % every)


def gpt_oss(ctx: Context) -> list[Layer]:
    """gpt-oss: a window on every even layer. Its sinks are learned weights and take no blocks."""
    return _mixed_layers(ctx, read_heads(ctx), SLIDING, lambda i: i % 2 == 0)


def llama4(ctx: Context) -> list[Layer]:
    """Llama 4: chunks on the layers with rotary embedding, full attention on those without (by default every 4th)."""
    count = _count(ctx)
    rotary = ctx.keys.integers("no_rope_layers") if ctx.keys.has("no_rope_layers") else []
    if rotary and len(rotary) != count:
        raise InvalidArgumentError(ctx.keys.field("no_rope_layers"), f"names {len(rotary)} layers, not {count}")
    every = ctx.keys.layers("no_rope_layer_interval", _LLAMA4_FULL_EVERY)
    rotary = rotary or [(i + 1) % every for i in range(count)]
    has_chunks = ctx.keys.has("attention_chunk_size")
    return _mixed_layers(ctx, read_heads(ctx), CHUNKED, lambda i: has_chunks and rotary[i])
