"""DeepSeek-V4: vectors of a window, beside vectors that stand for several tokens each.

1. Every layer keeps the vectors of its window. Its number in `compress_ratios` is 0 for no others, else the number of
   tokens that each of its other vectors stands for. If that is 4, an indexer selects vectors by keys of their own.
2. The tokens that the next vector depends on are a window, too: what is compressed of them, and how much each counts.
3. Ranks share none of these. Pages are padded to the strides of FlashMLA, and lie side by side in a block.

Source: the layers of deepseek_v4 in vLLM 0.32, in its layout fp8_ds_mla.
"""

from dataclasses import replace
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import AttentionSpec
from kvpool.core.specs.kinds import FP8_DS_MLA, MLAAttentionSpec, SlidingWindowMLASpec
from kvpool.models.context import DEFAULT_BLOCK_SIZE, Context, Layer
from kvpool.models.latent import indexer_key_bytes

_BLOCK_SIZE: Final = 256
_WINDOW_BLOCK_SIZE: Final = 64
_INPUTS: Final = {4: (4, 2), 128: (8, 1)}
"""By ratio: tokens of a block of the inputs, and number of vectors that depend on each token."""
_INDEXED: Final = 4
_STRIDE_BYTES: Final = 576
_SIZES: Final = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
"""Elements for which the layout and its kernels are made."""
_VECTOR_BYTES: Final = 584
"""448 fp8 elements, 64 of the rotary part in bfloat16, and 8 bytes of scales."""
_FP8: Final = ("", "auto", "fp8", "fp8_e4m3", "float8_e4m3fn", FP8_DS_MLA)


def compressed_layers(ctx: Context) -> list[Layer]:
    """Makes the layers, in vLLM's order.

    Raises:
        InvalidArgumentError: A key is missing, malformed or of a size without a layout, or an option asks for another
            layout.
    """
    keys = ctx.keys
    _check_options(ctx)
    for key in ("num_attention_heads", "o_groups"):
        ctx.shard(keys.field(key), keys.dimension(key))
    for key, size in _SIZES.items():
        if keys.dimension(key) != size:
            raise InvalidArgumentError(keys.field(key), f"is {keys.value(key)}; the layout {FP8_DS_MLA} has {size}")
    count, ratios = keys.layers("num_hidden_layers"), keys.integers("compress_ratios")
    if len(ratios) < count:  # those of draft layers follow
        raise InvalidArgumentError(keys.field("compress_ratios"), f"names {len(ratios)} layers, not {count}")
    ctx.note(f"{FP8_DS_MLA}: blocks of {_BLOCK_SIZE} tokens, and of {_WINDOW_BLOCK_SIZE} for windows, as in vLLM")
    return [layer for i, ratio in enumerate(ratios[:count]) for layer in _layers(ctx, i, ratio)]


def _check_options(ctx: Context) -> None:
    options = ctx.options
    if options.kv_dtype.lower().removeprefix("torch.") not in _FP8:
        message = f"{options.kv_dtype!r}: plans of this architecture are for the layout {FP8_DS_MLA} alone"
        raise InvalidArgumentError("kv_dtype", message)
    if options.block_size not in (DEFAULT_BLOCK_SIZE, _BLOCK_SIZE):
        message = f"{options.block_size}: kernels of this architecture take blocks of {_BLOCK_SIZE} tokens"
        raise InvalidArgumentError("block_size", f"{message}, as --backend FLASHMLA_SPARSE_DSV4 does")


def _layers(ctx: Context, index: int, ratio: int) -> list[Layer]:
    where, size, content = f"model.layers.{index}.self_attn", _SIZES["head_dim"], _VECTOR_BYTES
    window = ctx.keys.tokens("sliding_window")
    specs: dict[str, AttentionSpec] = {
        "swa_cache": SlidingWindowMLASpec(
            _WINDOW_BLOCK_SIZE, 1, size, "uint8", state_content_bytes=content, sliding_window=window
        )
    }
    if ratio:
        if ratio not in _INPUTS:
            field = f"{ctx.keys.field('compress_ratios')}[{index}]"
            raise InvalidArgumentError(field, f"{ratio} is not one of 0, {', '.join(map(str, _INPUTS))}")
        specs["attn"] = MLAAttentionSpec(
            _BLOCK_SIZE, 1, size, "uint8", state_content_bytes=content, tokens_per_state=ratio
        )
        specs["compressor.state_cache"] = _inputs(ratio, size)
    if ratio == _INDEXED:
        key_bytes = indexer_key_bytes(_SIZES["index_head_dim"])
        key = MLAAttentionSpec(_BLOCK_SIZE, 1, key_bytes, "uint8", tokens_per_state=ratio)
        inputs = _inputs(ratio, _SIZES["index_head_dim"])
        specs = {"indexer.k_cache": key, "indexer.compressor.state_cache": inputs, **specs}
    return [Layer(index, f"{where}.{name}", _padded(spec)) for name, spec in specs.items()]


def _inputs(ratio: int, size: int) -> SlidingWindowMLASpec:
    """Spec of the inputs of vectors of this size, and of their weights."""
    block_size, num = _INPUTS[ratio]
    return SlidingWindowMLASpec(block_size, 1, 2 * num * size, "float32", sliding_window=num * ratio)


def _padded(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, page_size_padded=-(-spec.content_size_bytes // _STRIDE_BYTES) * _STRIDE_BYTES)
