"""Whisper: an encoder without a cache, and a decoder with self attention and cross attention."""

from functools import partial

from kvpool.core.specs.kinds import CrossAttentionSpec, EncoderOnlyAttentionSpec, FullAttentionSpec
from kvpool.models.attention import Heads, elements_per_head, make_heads
from kvpool.models.context import Context, Layer, make_layer


def whisper(ctx: Context) -> list[Layer]:
    """All encoder layers, which belong to the stage of the first decoder layer, then two layers per decoder layer."""
    encoder = _heads(ctx, "encoder_attention_heads")
    decoder = _heads(ctx, "decoder_attention_heads")
    names = [f"model.encoder.layers.{i}.self_attn.attn" for i in range(ctx.keys.layers("encoder_layers"))]
    layers = [make_layer(0, name, partial(encoder.spec, EncoderOnlyAttentionSpec)) for name in names]
    for i in range(ctx.keys.layers("decoder_layers")):
        layer = f"model.decoder.layers.{i}"
        layers.append(make_layer(i, f"{layer}.self_attn.attn", partial(decoder.spec, FullAttentionSpec)))
        layers.append(make_layer(i, f"{layer}.encoder_attn.attn", partial(decoder.spec, CrossAttentionSpec)))
    return layers


def _heads(ctx: Context, key: str) -> Heads:
    heads = ctx.keys.dimension(key)
    head_size = elements_per_head(ctx.keys, "d_model", heads)
    return make_heads(ctx, ctx.shard_kv_heads(ctx.keys.field(key), heads), head_size)
