"""Configuration of the reference model: layer kinds, sizes, and the resulting cache specs."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.specs.base import KVCacheSpec, dtype_size_bytes
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


class LayerKind(Enum):
    """The attention kind of a layer."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "mla"
    MAMBA = "mamba"


_PATTERNS: Final[dict[str, tuple[LayerKind, ...]]] = {
    "full": (LayerKind.FULL,),
    "sliding": (LayerKind.SLIDING, LayerKind.SLIDING, LayerKind.FULL),
    "chunked": (LayerKind.CHUNKED, LayerKind.CHUNKED, LayerKind.FULL),
    "mla": (LayerKind.MLA,),
    "mamba": (LayerKind.MAMBA, LayerKind.FULL),
}
VARIANTS: Final = tuple(_PATTERNS)


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """Configuration of the model. All sizes are of the whole model, not of one rank.

    Attributes:
        variant: One of `VARIANTS`: the layer kinds that alternate.
        num_layers: Number of layers.
        hidden_size: Elements of the hidden state of a token.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; query heads share them evenly.
        head_size: Elements per head; even, because rotary embedding rotates pairs.
        intermediate_size: Elements between the two halves of the MLP.
        vocab_size: Size of the vocabulary.
        sliding_window: Tokens in the window of a sliding layer, including the token itself.
        attention_chunk_size: Tokens per chunk of the chunked layers.
        kv_lora_rank: Elements of MLA's latent vector.
        qk_rope_head_dim: Elements of MLA's rotary key, even.
        mamba_inner_size: Channels of a state-space layer.
        mamba_state_size: Elements of the recurrent state per channel.
        mamba_conv_kernel: Tokens in the convolution window, at least 2.
        mamba_conv_dtype: Element type of the stored inputs of the convolution.
        mamba_ssm_dtype: Element type in which the recurrence is stored and computed.
        block_size: Tokens per block. The planner may give a group larger blocks.
        dtype: Element type of weights and activations. With float64, two ways to compute a logit never differ enough to
            change a greedy token.
        seed: Seed of the weights.
    """

    variant: str = "full"
    num_layers: int = 6
    hidden_size: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 8
    intermediate_size: int = 64
    vocab_size: int = 128
    sliding_window: int = 10
    attention_chunk_size: int = 12
    kv_lora_rank: int = 12
    qk_rope_head_dim: int = 4
    mamba_inner_size: int = 16
    mamba_state_size: int = 4
    mamba_conv_kernel: int = 3
    mamba_conv_dtype: str = "float32"
    mamba_ssm_dtype: str = "float64"
    block_size: int = 4
    dtype: str = "float64"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.variant not in _PATTERNS:
            raise InvalidArgumentError("variant", f"{self.variant!r} is not known; known: {', '.join(VARIANTS)}")
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "intermediate_size",
            "vocab_size",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "mamba_inner_size",
            "mamba_state_size",
        ):
            check_range(name, getattr(self, name), 1, 2**20)
        check_range("mamba_conv_kernel", self.mamba_conv_kernel, 2, 64)
        for name in ("head_size", "qk_rope_head_dim"):
            if getattr(self, name) % 2:
                raise InvalidArgumentError(name, f"{getattr(self, name)} is odd: rotary embedding rotates pairs")
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgumentError(
                "num_kv_heads", f"{self.num_kv_heads} does not divide {self.num_heads} query heads"
            )
        for name in ("dtype", "mamba_conv_dtype", "mamba_ssm_dtype"):
            dtype_size_bytes(name, getattr(self, name))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        pattern = _PATTERNS[self.variant]
        return tuple(pattern[i % len(pattern)] for i in range(self.num_layers))

    def layer_name(self, index: int) -> str:
        """Name of a layer's cache, as engines spell it."""
        part = "mixer" if self.layer_kinds[index] is LayerKind.MAMBA else "self_attn"
        return f"model.layers.{index}.{part}"

    def check_tp_size(self, tp_size: int) -> None:
        """Checks that this number of tensor-parallel ranks divides the heads.

        Raises:
            InvalidArgumentError: It does not.
        """
        check_range("tp_size", tp_size, 1, 1024)
        for name in ("num_kv_heads", "intermediate_size", "mamba_inner_size"):
            if getattr(self, name) % tp_size:
                raise InvalidArgumentError("tp_size", f"{tp_size} ranks cannot divide {name} {getattr(self, name)}")

    def kv_cache_specs(self, tp_size: int = 1) -> dict[str, KVCacheSpec]:
        """Spec of each layer's cache on one of `tp_size` tensor-parallel ranks, in the model's order.

        Raises:
            InvalidArgumentError: The ranks cannot divide the heads.
        """
        self.check_tp_size(tp_size)
        return {self.layer_name(i): self._spec(kind, tp_size) for i, kind in enumerate(self.layer_kinds)}

    def _spec(self, kind: LayerKind, tp_size: int) -> KVCacheSpec:
        heads = (self.block_size, self.num_kv_heads // tp_size, self.head_size, self.dtype)
        if kind is LayerKind.SLIDING:
            return SlidingWindowSpec(*heads, sliding_window=self.sliding_window)
        if kind is LayerKind.CHUNKED:
            return ChunkedLocalAttentionSpec(*heads, attention_chunk_size=self.attention_chunk_size)
        if kind is LayerKind.MLA:
            return MLAAttentionSpec(self.block_size, 1, self.kv_lora_rank + self.qk_rope_head_dim, self.dtype)
        if kind is LayerKind.MAMBA:
            channels = self.mamba_inner_size // tp_size
            return MambaSpec(
                self.block_size,
                shapes=((channels, self.mamba_conv_kernel - 1), (channels, self.mamba_state_size)),
                dtypes=(self.mamba_conv_dtype, self.mamba_ssm_dtype),
                mamba_type="mamba1",
            )
        return FullAttentionSpec(*heads)
