"""Multi-head latent attention: one vector per token, which every rank holds completely, and keys of an indexer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvpool.core.specs.kinds import DS_MLA_TOKEN_BYTES, FP8_DS_MLA, MLAAttentionSpec
from kvpool.models.context import Context, Layer, make_layer
from kvpool.models.packing import PACKINGS, latent_content_bytes

_INDEXER_GROUP: Final = 128
"""Elements of an indexer key that share one float32 scale."""
_SCALE_BYTES: Final = 4


def latent_spec(ctx: Context, *, with_indexer: bool) -> Callable[[], MLAAttentionSpec]:
    """Maker of the spec of latent vectors. Attention to what an indexer selects keeps 8-bit vectors in a layout.

    Raises:
        InvalidArgumentError: A key is missing or malformed, or the requested type is not for such vectors.
    """
    keys, dtype = ctx.keys, ctx.kv_dtype
    ctx.shard(keys.field("num_attention_heads"), keys.dimension("num_attention_heads"))
    if with_indexer and dtype.startswith("float8"):
        ctx.note(f"kv_dtype {dtype}: sparse attention uses the layout {FP8_DS_MLA}")
        dtype = FP8_DS_MLA
    latent, rotary = keys.dimension("kv_lora_rank"), keys.dimension("qk_rope_head_dim")
    content_bytes = latent_content_bytes(dtype, latent, rotary)
    return partial(
        MLAAttentionSpec,
        ctx.options.block_size,
        head_size=latent + rotary,
        dtype=PACKINGS[dtype].dtype if content_bytes else dtype,
        cache_dtype_str=dtype if dtype in DS_MLA_TOKEN_BYTES else "",
        state_content_bytes=content_bytes,
    )


def indexer_layers(ctx: Context, indices: Sequence[int]) -> list[Layer]:
    """Makes the layers of the fp8 keys of indexers. A layer may use what the indexer of an earlier one selects."""
    key_bytes = indexer_key_bytes(ctx.keys.dimension("index_head_dim"))
    make_spec = partial(MLAAttentionSpec, ctx.options.block_size, head_size=key_bytes, dtype="uint8")
    return [
        make_layer(i, f"model.layers.{i}.self_attn.indexer.k_cache", make_spec)
        for i in indices
        if _has_own_indexer(ctx, i)
    ]


def indexer_key_bytes(size: int) -> int:
    """Bytes of an indexer's key of fp8 elements, and its scales."""
    return size + size // _INDEXER_GROUP * _SCALE_BYTES


def _has_own_indexer(ctx: Context, index: int) -> bool:
    keys = ctx.keys
    if keys.has("indexer_types"):
        kinds = keys.texts("indexer_types")
        return index >= len(kinds) or kinds[index] != "shared"
    if keys.has("index_topk_pattern"):
        pattern = keys.text("index_topk_pattern")
        return index >= len(pattern) or pattern[index] != "S"
    offset = keys.index("index_skip_topk_offset", 2)
    return max(index - offset + 1, 0) % keys.layers("index_topk_freq", 1) == 0
