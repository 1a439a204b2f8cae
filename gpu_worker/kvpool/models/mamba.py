"""Models with recurrent states, alone or combined with attention layers."""

from collections.abc import Mapping, Sequence
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.models.attention import FULL, layer_types, read_heads
from kvpool.models.context import Context, Layer
from kvpool.models.state import (
    Mamba2Keys,
    State,
    delta_net_state,
    hybrid_layers,
    mamba1_state,
    mamba2_state,
    state_layers,
)

LINEAR: Final = "linear_attention"
_EXPAND: Final = 2
_MAMBA2_KEYS: Final = Mamba2Keys("num_heads", "n_groups", "state_size", "conv_kernel")
_PREFIXED_KEYS: Final = Mamba2Keys("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_NEMOTRON_KEYS: Final = Mamba2Keys("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel")
_NEMOTRON_KINDS: Final = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Kinds of layers by name, with their letters."""
"""Mamba-2, attention, and two kinds of layers without a cache: dense and mixture of experts."""


def mamba1(ctx: Context) -> list[Layer]:
    """Mamba."""
    state = mamba1_state(ctx, *_width(ctx), state_key="state_size", conv_key="conv_kernel")
    return state_layers(ctx, state, _mixers(ctx))


def mamba2(ctx: Context) -> list[Layer]:
    """Mamba-2."""
    state = mamba2_state(ctx, _MAMBA2_KEYS, ctx.keys.dimension("head_dim"))
    return state_layers(ctx, state, _mixers(ctx))


def jamba(ctx: Context) -> list[Layer]:
    """Jamba: attention on every attn_layer_period-th layer from attn_layer_offset on, Mamba on the others."""
    keys = ctx.keys
    state = mamba1_state(
        ctx,
        keys.dimension("mamba_expand", _EXPAND) * keys.dimension("hidden_size"),
        "mamba_expand * hidden_size",
        state_key="mamba_d_state",
        conv_key="mamba_d_conv",
    )
    period, offset = keys.layers("attn_layer_period"), keys.index("attn_layer_offset")
    if offset >= period:
        raise InvalidArgumentError(keys.field("attn_layer_offset"), f"{offset} is not in [0, {period})")
    attends = [i % period == offset for i in range(keys.layers("num_hidden_layers"))]
    return _alternate(ctx, state, attends, attention="attn", mamba="mamba")


def bamba(ctx: Context) -> list[Layer]:
    """Bamba: attention on the layers that attn_layer_indices names, Mamba-2 on the others."""
    count = ctx.keys.layers("num_hidden_layers")
    chosen = ctx.keys.integers("attn_layer_indices")
    for i, index in enumerate(chosen):
        if index >= count:
            raise InvalidArgumentError(
                f"{ctx.keys.field('attn_layer_indices')}[{i}]", f"{index} is not in [0, {count})"
            )
    attends = [i in set(chosen) for i in range(count)]
    return _alternate(ctx, _prefixed_state(ctx), attends, attention="attn", mamba="mixer")


def granite_hybrid(ctx: Context) -> list[Layer]:
    """Granite 4: layer_types names "attention" and "mamba"; the latter is Mamba-2."""
    kinds = layer_types(ctx, ctx.keys.layers("num_hidden_layers"), ("attention", "mamba"))
    attends = [kind == "attention" for kind in kinds or ctx.keys.texts("layer_types")]
    if all(attends):
        return hybrid_layers(ctx, read_heads(ctx), State("mamba2", (), ()), _named(attends, "self_attn.attn"), [])
    return _alternate(ctx, _prefixed_state(ctx), attends, attention="self_attn.attn", mamba="mixer")


def nemotron_h(ctx: Context) -> list[Layer]:
    """Nemotron-H: the name of each layer's kind or, in older configurations, one letter per layer."""
    keys = ctx.keys
    if keys.has("layers_block_type"):
        pattern = _letters(keys.field("layers_block_type"), keys.texts("layers_block_type"), _NEMOTRON_KINDS)
    else:
        count, where = keys.layers("num_hidden_layers"), keys.field("hybrid_override_pattern")
        letters = {letter: letter for letter in _NEMOTRON_KINDS.values()}
        pattern = _letters(where, keys.text("hybrid_override_pattern"), letters)
        if len(pattern) != count:
            raise InvalidArgumentError(where, f"names {len(pattern)} layers, not {count}")
    heads = read_heads(ctx, head_dim_key="attention_head_dim" if keys.has("attention_head_dim") else "head_dim")
    state = mamba2_state(ctx, _NEMOTRON_KEYS, keys.dimension("mamba_head_dim"))
    attention = _named([kind == "*" for kind in pattern], "mixer.attn")
    mamba = _named([kind == "M" for kind in pattern], "mixer")
    return hybrid_layers(ctx, heads, state, attention, mamba)


def _letters(where: str, kinds: Sequence[str], known: Mapping[str, str]) -> str:
    if unknown := set(kinds) - known.keys():
        raise InvalidArgumentError(where, f"{min(unknown)!r} is not known; known: {', '.join(known)}")
    return "".join(known[kind] for kind in kinds)


def qwen3_next(ctx: Context) -> list[Layer]:
    """Qwen3-Next: layer_types, or full attention on every full_attention_interval-th layer; else gated delta nets."""
    count = ctx.keys.layers("num_hidden_layers")
    kinds = layer_types(ctx, count, (FULL, LINEAR))
    if kinds is None:
        every = ctx.keys.layers("full_attention_interval", 4)
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(count)]
    attends = [kind == FULL for kind in kinds]
    return _alternate(ctx, delta_net_state(ctx), attends, attention="self_attn.attn", mamba="linear_attn")


def _alternate(ctx: Context, state: State, attends: Sequence[bool], *, attention: str, mamba: str) -> list[Layer]:
    states = _named([not is_attention for is_attention in attends], mamba)
    return hybrid_layers(ctx, read_heads(ctx), state, _named(attends, attention), states)


def _named(chosen: Sequence[bool], suffix: str) -> list[tuple[int, str]]:
    return [(i, f"model.layers.{i}.{suffix}") for i, is_chosen in enumerate(chosen) if is_chosen]


def _mixers(ctx: Context) -> list[tuple[int, str]]:
    return _named([True] * ctx.keys.layers("num_hidden_layers"), "mixer")


def _width(ctx: Context) -> tuple[int, str]:
    if ctx.keys.has("intermediate_size"):
        return ctx.keys.dimension("intermediate_size"), "intermediate_size"
    return ctx.keys.dimension("expand", _EXPAND) * ctx.keys.dimension("hidden_size"), "expand * hidden_size"


def _prefixed_state(ctx: Context) -> State:
    """State under the keys of Bamba and Granite; mamba_d_head may be "auto"."""
    keys = ctx.keys
    if keys.values.get("mamba_d_head", "auto") == "auto":
        heads = keys.dimension("mamba_n_heads")
        width = keys.dimension("mamba_expand", _EXPAND) * keys.dimension("hidden_size")
        if width % heads:
            raise InvalidArgumentError(
                keys.field("mamba_n_heads"), f"{width} elements cannot be divided by {heads} heads"
            )
        head_size = width // heads
    else:
        head_size = keys.dimension("mamba_d_head")
    return mamba2_state(ctx, _PREFIXED_KEYS, head_size)
