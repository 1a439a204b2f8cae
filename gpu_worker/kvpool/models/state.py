"""Specs of layers with a recurrent state, and page sizes shared with attention layers.

Source: shapes follow vLLM's MambaStateShapeCalculator, types its MambaStateDtypeCalculator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import MAX_BLOCK_SIZE_TOKENS, dtype_size_bytes
from kvpool.core.specs.kinds import MambaSpec, state_size_bytes
from kvpool.models.attention import Heads
from kvpool.models.context import Context, Layer, naming_layer

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
class Mamba2Sizes:
    """Sizes of a Mamba-2 layer over all ranks.

    Attributes:
        conv_kernel: Tokens in the convolution window.
        num_heads: Number of heads of the recurrence.
        head_size: Elements per head.
        num_groups: Number of groups of heads that share input and output projections.
        state_size: Elements of the state per element of a head.
        heads_key: Key of num_heads, for errors.
        groups_key: Key of num_groups, for errors.
    """

    conv_kernel: int
    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    heads_key: str
    groups_key: str


def mamba1_state(ctx: Context, width: int, width_key: str, *, state_size: int, conv_kernel: int) -> State:
    """State of Mamba: convolution (conv_kernel - 1, width) and recurrence (width, state_size).

    Args:
        ctx: The config.
        width: Channels of a layer over all ranks.
        width_key: Key or expression of the width, for errors.
        state_size: Elements of the state per channel.
        conv_kernel: Tokens in the convolution window.
    """
    width = ctx.shard(width_key, width)
    return State("mamba1", ((conv_kernel - 1, width), (width, state_size)), _dtypes(ctx))


def mamba2_state(ctx: Context, sizes: Mamba2Sizes) -> State:
    """State of Mamba-2: convolution over heads and group projections; recurrence (num_heads, head_size, state_size)."""
    heads = ctx.shard(sizes.heads_key, sizes.num_heads)
    groups = ctx.shard_or_replicate(sizes.groups_key, sizes.num_groups)
    width = heads * sizes.head_size + 2 * groups * sizes.state_size
    conv = (sizes.conv_kernel - 1 + ctx.options.num_speculative_tokens, width)
    return State("mamba2", (conv, (heads, sizes.head_size, sizes.state_size)), _dtypes(ctx))


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


def state_layers(ctx: Context, state: State, names: Sequence[str]) -> list[Layer]:
    """Makes the layers of a model without attention."""
    block_size = ctx.options.block_size if ctx.options.mamba_caching else _whole_request(ctx)
    ctx.notes.append(f"Mamba block size: {block_size} tokens, {_reason(ctx, 'block_size')}")
    return [Layer(i, name, _spec(ctx, state, name, block_size, 0)) for i, name in enumerate(names)]


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
        return state_layers(ctx, state, [name for _, name in mamba])
    if mamba:
        heads = _grow_blocks(ctx, heads, state)
    page_bytes = heads.full().page_size_bytes
    layers = []
    for index, name in attention:
        with naming_layer(name):
            layers.append(Layer(index, name, heads.full()))
    if mamba:
        block_size = heads.block_size if ctx.options.mamba_caching else _whole_request(ctx)
        ctx.notes.append(f"Mamba block size: {block_size} tokens, {_reason(ctx, 'the attention block size')}")
        padded = page_bytes if page_bytes > state.size_bytes else 0
        layers += [Layer(index, name, _spec(ctx, state, name, block_size, padded)) for index, name in mamba]
    return sorted(layers, key=lambda layer: layer.index)


def _grow_blocks(ctx: Context, heads: Heads, state: State) -> Heads:
    token_bytes = heads.full().token_size_bytes
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


def _reason(ctx: Context, cached: str) -> str:
    if ctx.options.mamba_caching:
        return f"{cached}, as states are cached"
    return "max_model_len, as states are not cached and a request keeps one"


def _spec(ctx: Context, state: State, name: str, block_size: int, padded: int) -> MambaSpec:
    with naming_layer(name):
        return MambaSpec(
            block_size,
            state.shapes,
            state.dtypes,
            page_size_padded=padded,
            mamba_type=state.kind,
            num_speculative_blocks=ctx.options.num_speculative_tokens,
        )


def _dtypes(ctx: Context) -> tuple[str, str]:
    """Element types of convolution and recurrence: the model's type, unless the config states one for recurrence."""
    for key in _DTYPE_KEYS:
        if ctx.keys.has(key) and (dtype := ctx.keys.text(key)) != "auto":
            dtype_size_bytes(ctx.keys.field(key), dtype)
            return ctx.model_dtype, dtype
    return ctx.model_dtype, ctx.model_dtype
