"""DeepSeek: multi-head latent attention, one vector a token that every rank holds whole."""

from typing import Final

from kvpool.models.attention import kv_dtype
from kvpool.models.context import Context, Layer, naming_layer
from kvpool.server.core.specs import FP8_DS_MLA, MLAAttentionSpec

_INDEXER_GROUP: Final = 128
"""Elements of an indexer's key that share one float32 scale."""
_SCALE_BYTES: Final = 4


def deepseek(ctx: Context) -> list[Layer]:
    """DeepSeek V2 and V3."""
    count = ctx.keys.layers("num_hidden_layers")
    asked = ctx.options.kv_dtype
    return [_latent(ctx, i, asked) for i in range(count)]


def deepseek_v32(ctx: Context) -> list[Layer]:
    """DeepSeek V3.2: beside each latent vector, the fp8 key of an indexer that chooses what to attend to."""
    count = ctx.keys.layers("num_hidden_layers")
    size = ctx.keys.dimension("index_head_dim")
    asked = ctx.options.kv_dtype
    if asked.startswith("fp8") and asked != FP8_DS_MLA:
        ctx.notes.append(f"kv_dtype {asked}: sparse attention has its own layout of it, {FP8_DS_MLA}")
        asked = FP8_DS_MLA
    layers = []
    for i in range(count):
        layers.append(_latent(ctx, i, asked))
        name = f"model.layers.{i}.self_attn.indexer.k_cache"
        key_bytes = size + size // _INDEXER_GROUP * _SCALE_BYTES
        with naming_layer(name):
            spec = MLAAttentionSpec(ctx.options.block_size, head_size=key_bytes, dtype="uint8")
        layers.append(Layer(i, name, spec))
    return layers


def _latent(ctx: Context, index: int, asked: str) -> Layer:
    ctx.shard("num_attention_heads", ctx.keys.dimension("num_attention_heads"))
    head_size = ctx.keys.dimension("kv_lora_rank") + ctx.keys.dimension("qk_rope_head_dim")
    name = f"model.layers.{index}.self_attn.attn"
    dtype = "uint8" if asked == FP8_DS_MLA else kv_dtype(ctx)
    layout = FP8_DS_MLA if asked == FP8_DS_MLA else ""
    with naming_layer(name):
        spec = MLAAttentionSpec(ctx.options.block_size, head_size=head_size, dtype=dtype, cache_dtype_str=layout)
    return Layer(index, name, spec)
