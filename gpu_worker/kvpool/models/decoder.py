"""Layers of decoders: attention over keys and values or latent vectors, recurrent states, or both.

1. Kinds of layers come from `kinds`, sizes of a layer from the most particular keys: those of the layer
   (`per_layer_config`), of its kind (`swa_head_dim`), then those of all layers.
2. Layers that read the cache of earlier ones (`num_kv_shared_layers`) have none.
3. Pages of attention and of states have one size. As in vLLM, the attention block grows in whole blocks of the
   backend until its page holds a state, and the page of a state is padded to it.
4. Names of layers are kvpool's: one pattern for all models.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import MAX_BLOCK_SIZE_TOKENS, AttentionSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvpool.models.attention import keep_ends, read_heads
from kvpool.models.context import Context, Layer, make_layer
from kvpool.models.family import Family
from kvpool.models.kinds import ATTENDING, BOTH, CHUNKED, FULL, NAMES, SLIDING, STATE, read_kinds
from kvpool.models.latent import indexer_layers, latent_spec
from kvpool.models.reader import Reader
from kvpool.models.state import State, read_state

_OWN_KEYS: Final = {
    FULL: {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"},
    SLIDING: {
        "head_dim": "swa_head_dim",
        "v_head_dim": "swa_v_head_dim",
        "num_attention_heads": "swa_num_attention_heads",
        "num_key_value_heads": "swa_num_key_value_heads",
    },
}
"""Keys of the layers of a kind."""
_LATENT_STEP: Final = 128
"""Attention blocks of latent vectors beside states are multiples of this number of tokens."""


def decoder(ctx: Context, family: Family) -> list[Layer]:
    """Makes the layers of a decoder, in its order."""
    kinds = read_kinds(ctx.keys, family)
    attention = _attention_layers(ctx, family, kinds)
    with_state = [i for i, kind in enumerate(kinds) if kind in (STATE, BOTH)]
    if not with_state:
        return keep_ends(ctx, attention)
    state = read_state(ctx)
    if attention:
        attention = _grow_blocks(ctx, attention, state)
    layers = [*attention, *_state_layers(ctx, state, with_state, attention)]
    return sorted(layers, key=lambda layer: layer.index)


def _attention_layers(ctx: Context, family: Family, kinds: Sequence[str]) -> list[Layer]:
    num_own = len(kinds) - ctx.keys.index("num_kv_shared_layers", 0)
    attending = [i for i, kind in enumerate(kinds[: max(num_own, 0)]) if kind in ATTENDING]
    if family.is_latent and ctx.keys.flag("use_mla", default=True):
        return _latent_layers(ctx, family, attending)
    makers = ((i, _spec_maker(ctx, family, i, kinds[i])) for i in attending)
    return [make_layer(i, f"model.layers.{i}.self_attn.attn", make_spec) for i, make_spec in makers]


def _latent_layers(ctx: Context, family: Family, attending: Sequence[int]) -> list[Layer]:
    make_spec = latent_spec(ctx, with_indexer=family.has_indexer)
    copies = [f".{i}" for i in range(family.num_copies)] if family.num_copies > 1 else [""]
    names = [(i, f"model.layers.{i}.self_attn{copy}.attn") for i in attending for copy in copies]
    layers = [make_layer(i, name, make_spec) for i, name in names]
    if family.has_indexer:
        layers += indexer_layers(ctx, attending)
    return sorted(layers, key=lambda layer: layer.index)


def _spec_maker(ctx: Context, family: Family, index: int, kind: str) -> Callable[[], AttentionSpec]:
    keys = _layer_keys(ctx.keys, index, kind)
    heads = read_heads(ctx, keys, has_value_heads=family.has_value_heads)
    if kind == SLIDING:
        window = keys.tokens("sliding_window") + family.window_offset
        return partial(heads.spec, SlidingWindowSpec, sliding_window=window)
    if kind == CHUNKED:
        chunk = keys.tokens("attention_chunk_size")
        return partial(heads.spec, ChunkedLocalAttentionSpec, attention_chunk_size=chunk)
    return partial(heads.spec, FullAttentionSpec)


def _layer_keys(keys: Reader, index: int, kind: str) -> Reader:
    """Reader of the keys of one layer: its own, those of its kind, then those of all layers."""
    if kind in _OWN_KEYS:
        keys = keys.with_names(_OWN_KEYS[kind])
    if keys.has("attention_other_setting"):
        other = keys.section("attention_other_setting")
        if NAMES.get(other.text("attention_type", "")) == kind:
            keys = other.over(keys)
    if keys.has("per_layer_config"):
        layers = keys.section("per_layer_config")
        own = next((name for name in layers.values if name.lstrip("0") == str(index or "")), "")  # "05" as well as "5"
        if own:
            keys = layers.section(own).over(keys)
    return keys


def _state_layers(ctx: Context, state: State, indices: Sequence[int], attention: Sequence[Layer]) -> list[Layer]:
    """Makes the layers with a state, whose pages are as large as those of the attention layers."""
    block_size = attention[0].spec.block_size if attention else ctx.options.block_size
    if not ctx.options.mamba_caching:
        block_size = _whole_request(ctx)
        reason = "max_model_len, as states are not cached and a request keeps one"
    elif attention:
        reason = "the attention block size, as states are cached"
    else:
        reason = "block_size, as states are cached"
    ctx.notes.append(f"Mamba block size: {block_size} tokens, {reason}")
    page_bytes = max((layer.spec.page_size_bytes for layer in attention), default=0)
    make_spec = partial(
        MambaSpec,
        block_size,
        state.shapes,
        state.dtypes,
        page_size_padded=page_bytes if page_bytes > state.size_bytes else 0,
        mamba_type=state.kind,
        num_speculative_blocks=ctx.options.num_speculative_tokens,
    )
    return [make_layer(index, f"model.layers.{index}.mixer", make_spec) for index in indices]


def _grow_blocks(ctx: Context, attention: Sequence[Layer], state: State) -> list[Layer]:
    spec = attention[0].spec
    token_bytes = spec.content_size_bytes // spec.block_size
    step = max(ctx.block_step, spec.block_size)
    if isinstance(spec, FullAttentionSpec) and spec.is_latent:
        step = max(step, _LATENT_STEP)
    min_tokens = -(-state.size_bytes // (step * token_bytes)) * step
    block_size = max(spec.block_size, -(-min_tokens // ctx.block_step) * ctx.block_step)
    if block_size > MAX_BLOCK_SIZE_TOKENS:
        raise InvalidArgumentError(
            "block_size",
            f"a page of attention that holds a Mamba state of {state.size_bytes} bytes takes {block_size} tokens,"
            f" more than {MAX_BLOCK_SIZE_TOKENS}",
        )
    page_bytes = block_size * token_bytes
    ctx.notes.append(
        f"attention block size: {block_size} tokens; a page ({page_bytes} bytes) must hold a Mamba state"
        f" ({state.size_bytes} bytes, padded by {page_bytes - state.size_bytes}), which takes at least"
        f" {min_tokens} tokens"
    )
    return [replace(layer, spec=replace(layer.spec, block_size=block_size)) for layer in attention]


def _whole_request(ctx: Context) -> int:
    if ctx.max_model_len > MAX_BLOCK_SIZE_TOKENS:
        raise InvalidArgumentError(
            "max_model_len",
            f"without caching of Mamba states a block holds a whole request: {ctx.max_model_len} is more than"
            f" {MAX_BLOCK_SIZE_TOKENS}",
        )
    return ctx.max_model_len
