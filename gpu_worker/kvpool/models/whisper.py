"""Whisper: an encoder without a cache, and a decoder with self attention and cross attention."""

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.kinds import CrossAttentionSpec, EncoderOnlyAttentionSpec
from kvpool.models.attention import Heads, heads_dtype
from kvpool.models.context import Context, Layer, naming_layer


def whisper(ctx: Context) -> list[Layer]:
    """All encoder layers, which belong to the stage of the first decoder layer, then two layers per decoder layer."""
    encoder = _heads(ctx, "encoder_attention_heads")
    decoder = _heads(ctx, "decoder_attention_heads")
    layers = []
    for i in range(ctx.keys.layers("encoder_layers")):
        name = f"model.encoder.layers.{i}.self_attn.attn"
        with naming_layer(name):
            only = EncoderOnlyAttentionSpec(encoder.block_size, encoder.num_kv_heads, encoder.head_size, encoder.dtype)
        layers.append(Layer(0, name, only))
    for i in range(ctx.keys.layers("decoder_layers")):
        name = f"model.decoder.layers.{i}.self_attn.attn"
        with naming_layer(name):
            own = decoder.full()
        layers.append(Layer(i, name, own))
        name = f"model.decoder.layers.{i}.encoder_attn.attn"
        with naming_layer(name):
            cross = CrossAttentionSpec(decoder.block_size, decoder.num_kv_heads, decoder.head_size, decoder.dtype)
        layers.append(Layer(i, name, cross))
    return layers


def _heads(ctx: Context, key: str) -> Heads:
    heads, width = ctx.keys.dimension(key), ctx.keys.dimension("d_model")
    if width < heads:
        raise InvalidArgumentError(ctx.keys.field("d_model"), f"{width} is less than one for each head")
    return Heads(ctx.options.block_size, ctx.shard_kv_heads(key, heads), width // heads, heads_dtype(ctx))
