"""Recurrent states: their shapes and types, by the keys that a config has.

Source: shapes follow vLLM's MambaStateShapeCalculator, types its MambaStateDtypeCalculator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import dtype_size_bytes
from kvpool.core.specs.kinds import state_size_bytes
from kvpool.models.context import Context

_DTYPE_KEYS: Final = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
_EXPAND: Final = 2
_KDA_KERNEL: Final = 4


@dataclass(frozen=True, slots=True)
class State:
    """The state of one layer on one rank.

    Attributes:
        kind: Kernel that updates the state.
        shapes: Shapes of the convolution part and the recurrence part, as far as the kind has them.
        dtypes: Element type of each part.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all parts."""
        return state_size_bytes(self.shapes, self.dtypes)


class _Mamba2Keys(NamedTuple):
    """Keys of the sizes of a Mamba-2 layer over all ranks: heads, groups of heads that share projections, and so on.

    Attributes:
        telling: Keys that no other kind of state has; empty if those of heads and groups are.
    """

    num_heads: str
    num_groups: str
    state_size: str
    conv_kernel: str
    head_size: str
    telling: tuple[str, ...] = ()


_MAMBA2: Final = (
    _Mamba2Keys("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_d_head"),
    _Mamba2Keys("n_mamba_heads", "mamba_ngroups", "mamba_d_state", "mamba_d_conv", "mamba_headdim"),
    _Mamba2Keys(
        "mamba_num_heads",
        "n_groups",
        "ssm_state_size",
        "conv_kernel",
        "mamba_head_dim",
        telling=("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ),
    _Mamba2Keys("num_heads", "n_groups", "state_size", "conv_kernel", "head_dim"),
)
_MAMBA1: Final = (("mamba_d_state", "mamba_d_conv"), ("state_size", "conv_kernel"))
"""Keys of the elements of a Mamba state per channel, and of the tokens in the window of its convolution."""
_KINDS: Final = ("layer_types", "layers_block_type", "hybrid_override_pattern")


def read_state(ctx: Context) -> State:
    """Reads the state of each layer that has one.

    Raises:
        InvalidArgumentError: A key is missing or malformed, or the ranks cannot share the state.
    """
    keys = ctx.keys
    for key, read in _BY_KEY.items():
        if keys.has(key):
            return read(ctx)
    for names in _MAMBA2:
        if any(map(keys.has, names.telling or (names.num_heads, names.num_groups))):
            return _mamba2(ctx, names)
    for state_key, conv_key in _MAMBA1:
        if keys.has(state_key) or keys.has(conv_key):
            return _mamba1(ctx, state_key, conv_key)
    where = next((key for key in _KINDS if keys.has(key)), "layer_types")
    raise InvalidArgumentError(keys.field(where), "names layers with a state, and the config has no sizes of states")


def _mamba1(ctx: Context, state_key: str, conv_key: str) -> State:
    """Mamba: convolution (conv_kernel - 1, width) and recurrence (width, state_size)."""
    keys = ctx.keys
    if keys.has("intermediate_size") and not keys.has("mamba_expand"):
        name, width = "intermediate_size", keys.dimension("intermediate_size")
    else:
        key = "mamba_expand" if keys.has("mamba_expand") else "expand"
        name, width = f"{key} * hidden_size", keys.dimension(key, _EXPAND) * keys.dimension("hidden_size")
    width = ctx.shard(keys.field(name), width)
    conv = (keys.dimension(conv_key) - 1, width)
    return State("mamba1", (conv, (width, keys.dimension(state_key))), _dtypes(ctx))


def _mamba2(ctx: Context, names: _Mamba2Keys) -> State:
    """Mamba-2: convolution over heads and group projections; recurrence (num_heads, head_size, state_size)."""
    keys = ctx.keys
    num_heads = keys.dimension(names.num_heads)
    head_size = _mamba2_head_size(ctx, names, num_heads)
    heads = ctx.shard(keys.field(names.num_heads), num_heads)
    groups = keys.dimension(names.num_groups)
    if groups > 1:  # a single one is on every rank; vLLM divides others only evenly
        groups = ctx.shard(keys.field(names.num_groups), groups)
    state_size = keys.dimension(names.state_size)
    width = heads * head_size + 2 * groups * state_size
    conv = (_conv_length(ctx, keys.dimension(names.conv_kernel)), width)
    return State("mamba2", (conv, (heads, head_size, state_size)), _dtypes(ctx))


def _mamba2_head_size(ctx: Context, names: _Mamba2Keys, heads: int) -> int:
    """Elements of a head: as stated, or the layer's width over its heads if absent or "auto"."""
    keys = ctx.keys
    if keys.has(names.head_size) and keys.value(names.head_size) != "auto":
        return keys.dimension(names.head_size)
    if keys.has("mamba_d_ssm"):
        width = keys.dimension("mamba_d_ssm")
    else:
        width = keys.dimension("mamba_expand", _EXPAND) * keys.dimension("hidden_size")
    if width % heads:
        raise InvalidArgumentError(keys.field(names.num_heads), f"{width} elements cannot be divided by {heads} heads")
    return width // heads


def _delta_net(ctx: Context) -> State:
    """Gated delta net: convolution over queries, keys and values; recurrence (num_v_heads, head_v_dim, head_k_dim)."""
    keys = ctx.keys
    key_heads = ctx.shard(keys.field("linear_num_key_heads"), keys.dimension("linear_num_key_heads"))
    value_heads = ctx.shard(keys.field("linear_num_value_heads"), keys.dimension("linear_num_value_heads"))
    key_size, value_size = keys.dimension("linear_key_head_dim"), keys.dimension("linear_value_head_dim")
    width = 2 * key_heads * key_size + value_heads * value_size
    conv = (_conv_length(ctx, keys.dimension("linear_conv_kernel_dim")), width)
    return State("gdn_attention", (conv, (value_heads, value_size, key_size)), _dtypes(ctx))


def _delta_attention(ctx: Context) -> State:
    """Kimi delta attention: as the gated delta net with equal heads, and its recurrence in float32."""
    keys = ctx.keys
    own = keys.section("linear_attn_config") if keys.has("linear_attn_config") else keys
    name = "num_heads" if own is not keys else "num_attention_heads"
    heads = ctx.shard(own.field(name), own.dimension(name))
    size = own.dimension("head_dim")
    conv = (_conv_length(ctx, own.dimension("short_conv_kernel_size", _KDA_KERNEL)), 3 * heads * size)
    return State("kda", (conv, (heads, size, size)), (ctx.model_dtype, "float32"))


def _short_convolution(ctx: Context) -> State:
    """A convolution over the last tokens alone: (conv_kernel - 1, width)."""
    key = "conv_dim" if ctx.keys.has("conv_dim") else "hidden_size"
    width = ctx.shard(ctx.keys.field(key), ctx.keys.dimension(key))
    return State("short_conv", ((ctx.keys.dimension("conv_L_cache") - 1, width),), (ctx.model_dtype,))


def _linear_attention(ctx: Context) -> State:
    """Lightning attention: a matrix (head_dim, head_dim) per head."""
    keys = ctx.keys
    num_heads = keys.dimension("num_attention_heads")
    size = keys.dimension("head_dim") if keys.has("head_dim") else keys.dimension("hidden_size") // num_heads
    heads = ctx.shard(keys.field("num_attention_heads"), num_heads)
    return State("linear_attention", ((heads, size, size),), (ctx.model_dtype,))


_BY_KEY: Final[dict[str, Callable[[Context], State]]] = {
    "linear_attn_config": _delta_attention,
    "short_conv_kernel_size": _delta_attention,
    "linear_num_value_heads": _delta_net,
    "linear_num_key_heads": _delta_net,
    "conv_L_cache": _short_convolution,
    "layer_group_size": _linear_attention,
}
"""Kinds of states that one key tells."""


def _conv_length(ctx: Context, kernel: int) -> int:
    """Tokens that a convolution keeps: those before the next one, and drafts."""
    return kernel - 1 + ctx.options.num_speculative_tokens


def _dtypes(ctx: Context) -> tuple[str, str]:
    """Element types of convolution and recurrence: the model's type, unless the config states one for recurrence."""
    for key in _DTYPE_KEYS:
        if ctx.keys.has(key) and (dtype := ctx.keys.text(key)) != "auto":
            dtype_size_bytes(ctx.keys.field(key), dtype)
            return ctx.model_dtype, dtype
    return ctx.model_dtype, ctx.model_dtype
