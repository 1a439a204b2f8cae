"""DeepSeek: multi-head latent attention, with one vector per token that every rank holds completely."""

from functools import partial
from typing import Final

from kvpool.core.specs.kinds import DS_MLA_TOKEN_BYTES, FP8_DS_MLA, MLAAttentionSpec
from kvpool.models.context import Context, Layer, make_layer
from kvpool.models.packing import PACKINGS, latent_content_bytes

_INDEXER_GROUP: Final = 128
"""Elements of an indexer key that share one float32 scale."""
_SCALE_BYTES: Final = 4


def deepseek(ctx: Context) -> list[Layer]:
    """DeepSeek V2 and V3, GLM-4 MoE Lite, Kimi K2.5."""
    count = ctx.keys.layers("num_hidden_layers")
    return [_latent(ctx, i, ctx.kv_dtype) for i in range(count)]


def deepseek_v32(ctx: Context) -> list[Layer]:
    """DeepSeek V3.2: a latent vector, and the fp8 key of an indexer that selects the tokens to attend to."""
    count = ctx.keys.layers("num_hidden_layers")
    size = ctx.keys.dimension("index_head_dim")
    dtype = ctx.kv_dtype
    if dtype.startswith("float8"):
        ctx.notes.append(f"kv_dtype {dtype}: sparse attention uses the layout {FP8_DS_MLA}")
        dtype = FP8_DS_MLA
    layers = []
    for i in range(count):
        layers.append(_latent(ctx, i, dtype))
        name = f"model.layers.{i}.self_attn.indexer.k_cache"
        key_bytes = size + size // _INDEXER_GROUP * _SCALE_BYTES
        make_spec = partial(MLAAttentionSpec, ctx.options.block_size, head_size=key_bytes, dtype="uint8")
        layers.append(make_layer(i, name, make_spec))
    return layers


def _latent(ctx: Context, index: int, kv_dtype: str) -> Layer:
    ctx.shard("num_attention_heads", ctx.keys.dimension("num_attention_heads"))
    latent, rotary = ctx.keys.dimension("kv_lora_rank"), ctx.keys.dimension("qk_rope_head_dim")
    content_bytes = latent_content_bytes(kv_dtype, latent, rotary)
    name = f"model.layers.{index}.self_attn.attn"
    make_spec = partial(
        MLAAttentionSpec,
        ctx.options.block_size,
        head_size=latent + rotary,
        dtype=PACKINGS[kv_dtype].dtype if content_bytes else kv_dtype,
        cache_dtype_str=kv_dtype if kv_dtype in DS_MLA_TOKEN_BYTES else "",
        state_content_bytes=content_bytes,
    )
    return make_layer(index, name, make_spec)
