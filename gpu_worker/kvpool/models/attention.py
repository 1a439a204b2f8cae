"""Heads of keys and values, and packed types that keep some layers in the model's type."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import AttentionSpec
from kvpool.models.context import Context, Layer
from kvpool.models.packing import PACKINGS, head_content_bytes
from kvpool.models.reader import Reader

_NUM_ENDS: Final = 2
"""Number of layers at each end that keep the model's type, where the packed type asks for it."""

_AttentionT = TypeVar("_AttentionT", bound=AttentionSpec)


@dataclass(frozen=True, slots=True)
class Heads:
    """Properties of the heads of a layer, on one rank.

    Attributes:
        block_size: Tokens per block.
        num_kv_heads: Number of key and value heads on the rank.
        head_size: Elements per head.
        dtype: Element type.
        num_head_slots: See `AttentionSpec`.
        state_content_bytes: See `AttentionSpec`.
        head_size_v: See `AttentionSpec`.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    num_head_slots: int = 0
    state_content_bytes: int = 0
    head_size_v: int = 0

    def spec(self, kind: type[_AttentionT], **own: int) -> _AttentionT:
        """Spec of a layer.

        Args:
            kind: Kind of attention.
            own: Attributes that only this kind has.
        """
        names = ("num_head_slots", "state_content_bytes", "head_size_v")
        own = {**{name: getattr(self, name) for name in names}, **own}
        return kind(self.block_size, self.num_kv_heads, self.head_size, self.dtype, **own)


def make_heads(ctx: Context, num_kv_heads: int, head_size: int) -> Heads:
    """Makes the properties of heads of the requested type.

    Raises:
        InvalidArgumentError: The type is for latent vectors only, or not for heads of this size.
    """
    block_size, packing = ctx.options.block_size, PACKINGS.get(ctx.kv_dtype)
    if packing is None:
        return Heads(block_size, num_kv_heads, head_size, ctx.kv_dtype)
    content_bytes = head_content_bytes(ctx.kv_dtype, head_size)
    num_slots = packing.num_slots * num_kv_heads if packing.num_slots > 1 else 0
    note = f"kv_dtype {ctx.kv_dtype}: {packing.num_slots * content_bytes} bytes per token and head, as vLLM packs them"
    ctx.note(note)
    return Heads(block_size, num_kv_heads, head_size, packing.dtype, num_slots, content_bytes)


def read_heads(ctx: Context, keys: Reader, *, has_value_heads: bool = False) -> Heads:
    """Reads the properties of a layer's heads.

    Args:
        ctx: The config.
        keys: The keys of the layer.
        has_value_heads: Whether v_head_dim is the size of values.

    Without num_key_value_heads, there is a head of keys and values for each head of queries. Without head_dim, the
    heads share hidden_size.
    """
    heads = keys.dimension("num_attention_heads")
    ctx.shard(keys.field("num_attention_heads"), heads)
    name = "num_key_value_heads" if keys.has("num_key_value_heads") else "num_attention_heads"
    kv_heads = ctx.shard_kv_heads(keys.field(name), keys.dimension(name))
    head_size = keys.dimension("head_dim") if keys.has("head_dim") else elements_per_head(keys, "hidden_size", heads)
    made = make_heads(ctx, kv_heads, head_size)
    return replace(made, head_size_v=keys.dimension("v_head_dim", head_size)) if has_value_heads else made


def elements_per_head(keys: Reader, width_key: str, heads: int) -> int:
    """Divides the width of a layer over its heads.

    Raises:
        InvalidArgumentError: There are more heads than elements.
    """
    width = keys.dimension(width_key)
    if width < heads:
        raise InvalidArgumentError(keys.field(width_key), f"{width} is less than one for each head")
    return width // heads


def keep_ends(ctx: Context, layers: Sequence[Layer]) -> list[Layer]:
    """Gives the first and last layers the model's type, where the packed type asks for it.

    Blocks of both have the same number of tokens. As in vLLM, a page of packed layers is at least as large as the
    smallest block of the backend in the model's type.
    """
    packing = PACKINGS.get(ctx.kv_dtype)
    if packing is None or not packing.keeps_ends or not layers:
        return list(layers)
    num_ends = min(_NUM_ENDS, len(layers) // 2)
    ends = {*range(num_ends), *range(len(layers) - num_ends, len(layers))}
    specs = [layer.spec for layer in layers if isinstance(layer.spec, AttentionSpec)]
    whole = [replace(spec, dtype=ctx.model_dtype, num_head_slots=0, state_content_bytes=0) for spec in specs]
    block_size = max(_covering_block(ctx, packed, kept) for packed, kept in zip(specs, whole, strict=True))
    ctx.note(
        f"kv_dtype {ctx.kv_dtype}: the first {_NUM_ENDS} and the last {_NUM_ENDS} layers keep {ctx.model_dtype}; blocks"
        f" have {block_size} tokens"
    )
    chosen = [whole[i] if i in ends else packed for i, packed in enumerate(specs)]
    return [
        replace(layer, spec=replace(spec, block_size=block_size)) for layer, spec in zip(layers, chosen, strict=True)
    ]


def _covering_block(ctx: Context, packed: AttentionSpec, kept: AttentionSpec) -> int:
    """Tokens of a block of packed layers whose page holds the backend's smallest block in the model's type."""
    step = max(ctx.block_step, packed.block_size)
    return step * -(-kept.state_size_bytes * ctx.block_step // (step * packed.state_size_bytes))
