"""Specs of layers with a recurrent state, and page sizes shared with attention layers.

Source: shapes follow vLLM's MambaStateShapeCalculator, types its MambaStateDtypeCalculator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import MAX_BLOCK_SIZE_TOKENS, dtype_size_bytes
from kvpool.core.specs.kinds import MambaSpec, state_size_bytes
from kvpool.models.attention import Heads
from kvpool.models.context import Context, Layer, make_layer

_BLOCK_STEP: Final = 16
"""Attention kernels require a block size that is a multiple of this number of tokens."""
_DTYPE_KEYS: Final = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")


@dataclass(frozen=True, slots=True)
class State:
    """The state of one layer on one rank.

    Attributes:
        kind: Kernel that updates the state.
        shapes: Shapes of the convolution part and the recurrence part.
        dtypes: Element type of each part.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all parts."""
        return state_size_bytes(self.shapes, self.dtypes)


@dataclass(frozen=True, slots=True)
class Mamba2Keys:
    """Keys of the sizes of a Mamba-2 layer over all ranks.

    Attributes:
        num_heads: Key of the number of heads of the recurrence.
        num_groups: Key of the number of groups of heads that share input and output projections.
        state_size: Key of the elements of the state per element of a head.
        conv_kernel: Key of the tokens in the convolution window.
    """

    num_heads: str
    num_groups: str
    state_size: str
    conv_kernel: str


def mamba1_state(ctx: Context, width: int, width_key: str, *, state_key: str, conv_key: str) -> State:
    """State of Mamba: convolution (conv_kernel - 1, width) and recurrence (width, state_size).

    Args:
        ctx: The config.
        width: Channels of a layer over all ranks.
        width_key: Key or expression of the width, for errors.
        state_key: Key of the elements of the state per channel.
        conv_key: Key of the tokens in the convolution window.
    """
    width = ctx.shard(width_key, width)
    conv = (ctx.keys.dimension(conv_key) - 1, width)
    return State("mamba1", (conv, (width, ctx.keys.dimension(state_key))), _dtypes(ctx))


def mamba2_state(ctx: Context, sizes: Mamba2Keys, head_size: int) -> State:
    """State of Mamba-2: convolution over heads and group projections; recurrence (num_heads, head_size, state_size)."""
    keys = ctx.keys
    heads = ctx.shard(sizes.num_heads, keys.dimension(sizes.num_heads))
    groups = ctx.shard_or_replicate(sizes.num_groups, keys.dimension(sizes.num_groups))
    state_size = keys.dimension(sizes.state_size)
    width = heads * head_size + 2 * groups * state_size
    conv = (keys.dimension(sizes.conv_kernel) - 1 + ctx.options.num_speculative_tokens, width)
    return State("mamba2", (conv, (heads, head_size, state_size)), _dtypes(ctx))


def delta_net_state(ctx: Context) -> State:
    """Gated delta net: convolution over queries, keys and values; recurrence (num_v_heads, head_v_dim, head_k_dim)."""
    keys = ctx.keys
    key_heads = ctx.shard("linear_num_key_heads", keys.dimension("linear_num_key_heads"))
    value_heads = ctx.shard("linear_num_value_heads", keys.dimension("linear_num_value_heads"))
    key_size, value_size = keys.dimension("linear_key_head_dim"), keys.dimension("linear_value_head_dim")
    width = 2 * key_heads * key_size + value_heads * value_size
    kernel = keys.dimension("linear_conv_kernel_dim")
    conv = (kernel - 1 + ctx.options.num_speculative_tokens, width)
    return State("gdn_attention", (conv, (value_heads, value_size, key_size)), _dtypes(ctx))


def state_layers(
    ctx: Context, state: State, layers: Sequence[tuple[int, str]], heads: Heads | None = None
) -> list[Layer]:
    """Makes the layers with a state.

    Args:
        ctx: The config.
        state: The state of each layer.
        layers: Number and name of each layer.
        heads: Properties of the attention layers whose pages have the same size; None for a model without attention.
    """
    if not ctx.options.mamba_caching:
        block_size = _whole_request(ctx)
        reason = "max_model_len, as states are not cached and a request keeps one"
    elif heads:
        block_size, reason = heads.block_size, "the attention block size, as states are cached"
    else:
        block_size, reason = ctx.options.block_size, "block_size, as states are cached"
    ctx.notes.append(f"Mamba block size: {block_size} tokens, {reason}")
    page_bytes = heads.full().page_size_bytes if heads else 0
    make_spec = partial(
        MambaSpec,
        block_size,
        state.shapes,
        state.dtypes,
        page_size_padded=page_bytes if page_bytes > state.size_bytes else 0,
        mamba_type=state.kind,
        num_speculative_blocks=ctx.options.num_speculative_tokens,
    )
    return [make_layer(index, name, make_spec) for index, name in layers]


def hybrid_layers(
    ctx: Context, heads: Heads, state: State, attention: Sequence[tuple[int, str]], mamba: Sequence[tuple[int, str]]
) -> list[Layer]:
    """Makes the layers of a model with attention and states, whose pages must have one size.

    As in vLLM, the attention block size grows in steps of 16 tokens until a page holds a state, and the page of a state
    is padded to that size.

    Args:
        ctx: The config.
        heads: Properties that the attention layers share; its block_size may grow.
        state: The state of each Mamba layer.
        attention: Number and name of each attention layer.
        mamba: Number and name of each Mamba layer.
    """
    if not attention:
        return state_layers(ctx, state, mamba)
    if mamba:
        heads = _grow_blocks(ctx, heads, state)
    layers = [make_layer(index, name, heads.full) for index, name in attention]
    if mamba:
        layers += state_layers(ctx, state, mamba, heads)
    return sorted(layers, key=lambda layer: layer.index)


def _grow_blocks(ctx: Context, heads: Heads, state: State) -> Heads:
    token_bytes = heads.full().state_size_bytes
    min_tokens = -(-state.size_bytes // (_BLOCK_STEP * token_bytes)) * _BLOCK_STEP
    grown = replace(heads, block_size=max(heads.block_size, min_tokens))
    if grown.block_size > MAX_BLOCK_SIZE_TOKENS:
        raise InvalidArgumentError(
            "block_size",
            f"a page of attention that holds a Mamba state of {state.size_bytes} bytes takes {grown.block_size} tokens,"
            f" more than {MAX_BLOCK_SIZE_TOKENS}",
        )
    page_bytes = grown.block_size * token_bytes
    ctx.notes.append(
        f"attention block size: {grown.block_size} tokens; a page ({page_bytes} bytes) must hold a Mamba state"
        f" ({state.size_bytes} bytes, padded by {page_bytes - state.size_bytes}), which takes at least"
        f" {min_tokens} tokens"
    )
    return grown


def _whole_request(ctx: Context) -> int:
    if ctx.max_model_len > MAX_BLOCK_SIZE_TOKENS:
        raise InvalidArgumentError(
            "max_model_len",
            f"without caching of Mamba states a block holds a whole request: {ctx.max_model_len} is more than"
            f" {MAX_BLOCK_SIZE_TOKENS}",
        )
    return ctx.max_model_len


def _dtypes(ctx: Context) -> tuple[str, str]:
    """Element types of convolution and recurrence: the model's type, unless the config states one for recurrence."""
    for key in _DTYPE_KEYS:
        if ctx.keys.has(key) and (dtype := ctx.keys.text(key)) != "auto":
            dtype_size_bytes(ctx.keys.field(key), dtype)
            return ctx.model_dtype, dtype
    return ctx.model_dtype, ctx.model_dtype
