"""What a layer keeps for its tokens: one frozen value a kind of attention.

`num_skipped_tokens` is all that allocation has to know of a kind: the tokens that no later token looks back at. The
rest (look-up, freeing behind a window, caching) follows from it; see `group_manager` and `prefix_search`.

Source: the kinds and their memory are those of vLLM's kv_cache_interface.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Final, Self

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_TOKENS
from kvpool.core.specs.base import (
    DTYPE_SIZES_BYTES,
    MAX_DIMENSION,
    QUOTED_CHARACTERS,
    AttentionSpec,
    KVCacheSpec,
    RequestLimits,
    check_page,
    dtype_size_bytes,
)

FP8_DS_MLA: Final = "fp8_ds_mla"
_FP8_DS_MLA_TOKEN_BYTES: Final = 656
"""512 fp8 values, 4 float32 scales, 64 bfloat16 values of the rotary part (FlashMLA's layout for DeepSeek V3.2)."""
MAX_STATE_TENSORS: Final = 16
MAX_STATE_DIMENSIONS: Final = 8
MAX_LAYERS: Final = 4096


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """Every token attends to all before it.

    Attributes:
        sliding_window: Window in tokens that the layers have, though all tokens are kept (hybrid management is off).
        attention_chunk_size: Likewise, the chunk in tokens.
    """

    sliding_window: int = 0
    attention_chunk_size: int = 0

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        check_range("sliding_window", self.sliding_window, 0, MAX_TOKENS)
        check_range("attention_chunk_size", self.attention_chunk_size, 0, MAX_TOKENS)
        if self.sliding_window and self.attention_chunk_size:
            raise InvalidArgumentError("attention_chunk_size", "a layer has a sliding window or a chunk, not both")

    def merged_with(self, others: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
        """Merges specs that differ in whether they remember a window; they must not remember two."""
        windows, chunks = {self.sliding_window}, {self.attention_chunk_size}
        bare = replace(self, sliding_window=0, attention_chunk_size=0)
        for other in others:
            if not isinstance(other, FullAttentionSpec):
                return None
            if replace(other, sliding_window=0, attention_chunk_size=0) != bare:
                return None
            windows.add(other.sliding_window)
            chunks.add(other.attention_chunk_size)
        if len((windows | chunks) - {0}) > 1 or (max(windows) and max(chunks)):
            return None
        return replace(bare, sliding_window=max(windows), attention_chunk_size=max(chunks))

    def allocates_like(self, other: KVCacheSpec) -> bool:
        """All kinds of full attention do, sinks apart."""
        return (
            isinstance(other, FullAttentionSpec)
            and self.block_size == other.block_size
            and num_sink_tokens(self) == num_sink_tokens(other)
        )


@dataclass(frozen=True, slots=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one latent vector a token, (block_size, head_size), in place of keys and values.

    Attributes:
        cache_dtype_str: "fp8_ds_mla" for the layout of 656 bytes a token; else empty.
    """

    num_kv_heads: int = 1
    cache_dtype_str: str = ""

    def __post_init__(self) -> None:
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", 1)
        FullAttentionSpec.__post_init__(self)
        if self.cache_dtype_str not in ("", FP8_DS_MLA):
            message = f"{self.cache_dtype_str[:QUOTED_CHARACTERS]!r} is not known; known: {FP8_DS_MLA!r}"
            raise InvalidArgumentError("cache_dtype_str", message)

    @property
    def token_size_bytes(self) -> int:
        """Bytes of one token's latent vector."""
        if self.cache_dtype_str == FP8_DS_MLA:
            return _FP8_DS_MLA_TOKEN_BYTES
        return self.num_kv_heads * self.head_size * DTYPE_SIZES_BYTES.get(self.dtype, 0)


@dataclass(frozen=True, slots=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention, and attention sinks that all requests share.

    Attributes:
        sink_len: Sink tokens; whole blocks of the pool are set aside for them.
    """

    sink_len: int = 0

    def __post_init__(self) -> None:
        FullAttentionSpec.__post_init__(self)
        check_range("sink_len", self.sink_len, 1, MAX_TOKENS)
        if self.sink_len % self.block_size:
            raise InvalidArgumentError("sink_len", f"{self.sink_len} is no multiple of block_size {self.block_size}")

    def _can_have_blocks_of(self, block_size: int) -> bool:
        return self.sink_len % block_size == 0


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """Every token attends to itself and the sliding_window - 1 tokens before it.

    Attributes:
        sliding_window: Tokens, at least 1.
    """

    sliding_window: int = 0

    keeps_all: ClassVar[bool] = False

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        check_range("sliding_window", self.sliding_window, 1, MAX_TOKENS)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """The next token, at num_computed_tokens, sees sliding_window - 1 before itself."""
        return max(num_computed_tokens - self.sliding_window + 1, 0)

    def num_computed_to_skip(self, num_tokens: int) -> int:
        """See `KVCacheSpec`."""
        return num_tokens + self.sliding_window - 1

    def max_blocks(self, limits: RequestLimits) -> int:
        """The window and what one step computes; one more, as a window need not begin with a block."""
        span = self.block_size * limits.context_parallel_size
        tokens = min(self.sliding_window - 1 + limits.max_num_batched_tokens, limits.max_model_len)
        return -(-tokens // span) + 1

    def allocates_like(self, other: KVCacheSpec) -> bool:
        """Windows of one size do."""
        return (
            isinstance(other, SlidingWindowSpec)
            and (self.block_size, self.sliding_window) == (other.block_size, other.sliding_window)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Every token attends to those before it in its own chunk: [n * size, (n + 1) * size).

    Attributes:
        attention_chunk_size: Tokens, at least 1.
    """

    attention_chunk_size: int = 0

    keeps_all: ClassVar[bool] = False

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        check_range("attention_chunk_size", self.attention_chunk_size, 1, MAX_TOKENS)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All chunks before that of the next token."""
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    def num_computed_to_skip(self, num_tokens: int) -> int:
        """See `KVCacheSpec`."""
        return -(-num_tokens // self.attention_chunk_size) * self.attention_chunk_size

    def max_blocks(self, limits: RequestLimits) -> int:
        """A chunk and what one step computes; one more where a chunk need not begin with a block."""
        span = self.block_size * limits.context_parallel_size
        tokens = min(self.attention_chunk_size + limits.max_num_batched_tokens, limits.max_model_len)
        blocks = -(-tokens // span) + (1 if self.attention_chunk_size % span else 0)
        return min(blocks, -(-limits.max_model_len // span))

    def allocates_like(self, other: KVCacheSpec) -> bool:
        """Chunks of one size do."""
        return (
            isinstance(other, ChunkedLocalAttentionSpec)
            and (self.block_size, self.attention_chunk_size) == (other.block_size, other.attention_chunk_size)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MambaSpec(KVCacheSpec):
    """A state that every token renews: a block holds it as it is after the block's last token computed so far.

    Attributes:
        shapes: Shape of each part of the state (convolution, recurrence) on one rank; empty if not declared. At most
            16 parts of 8 dimensions.
        dtypes: Element type of each part.
        page_size_padded: Bytes to which the page is padded; 0 for none.
        mamba_type: Which kernel ("mamba1", "mamba2", "gdn_attention", ...), for the worker; empty if not declared.
        num_speculative_blocks: Blocks kept beyond the last token, for the states after each draft.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    page_size_padded: int = 0
    mamba_type: str = ""
    num_speculative_blocks: int = 0

    is_sharded: ClassVar[bool] = False
    keeps_all: ClassVar[bool] = False
    has_token_slots: ClassVar[bool] = False

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        if len(self.shapes) != len(self.dtypes):
            raise InvalidArgumentError("dtypes", f"{len(self.dtypes)} types for {len(self.shapes)} shapes")
        check_range("shapes", len(self.shapes), 0, MAX_STATE_TENSORS)
        for i, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            check_range(f"shapes[{i}]", len(shape), 0, MAX_STATE_DIMENSIONS)
            for j, size in enumerate(shape):
                check_range(f"shapes[{i}][{j}]", size, 1, MAX_DIMENSION)
            dtype_size_bytes(f"dtypes[{i}]", dtype)
        check_page(self.content_size_bytes, self.page_size_padded)
        check_range("num_speculative_blocks", self.num_speculative_blocks, 0, 1024)
        if len(self.mamba_type) > 64:  # noqa: PLR2004 - the proto states it
            raise InvalidArgumentError("mamba_type", "longer than 64 characters")

    @property
    def content_size_bytes(self) -> int:
        """Bytes of all parts of the state."""
        return state_size_bytes(self.shapes, self.dtypes)

    @property
    def page_size_bytes(self) -> int:
        """See `KVCacheSpec`."""
        return self.page_size_padded or self.content_size_bytes

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Only the state after the last computed token is read again."""
        return max(num_computed_tokens - 1, 0)

    def num_computed_to_skip(self, num_tokens: int) -> int:
        """See `KVCacheSpec`."""
        return num_tokens + 1

    def max_blocks(self, limits: RequestLimits) -> int:
        """A state a block, and the speculative ones: as the reference counts, though most are freed as it goes on."""
        return -(-limits.max_model_len // self.block_size) + self.num_speculative_blocks

    def with_page_size(self, page_size_bytes: int) -> Self:
        """A state does not grow with the block: only padding helps."""
        return replace(self, page_size_padded=page_size_bytes)

    def allocates_like(self, other: KVCacheSpec) -> bool:
        """States with equally many speculative blocks do."""
        return (
            isinstance(other, MambaSpec)
            and (self.block_size, self.num_speculative_blocks) == (other.block_size, other.num_speculative_blocks)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(AttentionSpec):
    """Decoder layers that attend to what the encoder put out: keys and values of encoder tokens, written once."""

    is_sharded: ClassVar[bool] = False
    keeps_tokens: ClassVar[bool] = False

    def max_blocks(self, limits: RequestLimits) -> int:
        """Those of the encoder's tokens."""
        return -(-limits.max_num_encoder_input_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Encoder layers: they see all tokens at once and keep nothing."""

    keeps_tokens: ClassVar[bool] = False

    def max_blocks(self, limits: RequestLimits) -> int:
        """None: nothing is kept."""
        del limits
        return 0


@dataclass(frozen=True, slots=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one kind, with one block table, whose pages differ in size (hidden sizes differ).

    Attributes:
        layers: Spec of each layer, by name; at least one.
    """

    layers: tuple[tuple[str, KVCacheSpec], ...] = ()

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        check_range("layers", len(self.layers), 1, MAX_LAYERS)
        names: set[str] = set()
        for i, (name, spec) in enumerate(self.layers):
            if name in names:
                raise InvalidArgumentError(f"layers[{i}]", f"{name[:QUOTED_CHARACTERS]!r} stands twice")
            names.add(name)
            if spec.block_size != self.block_size:
                raise InvalidArgumentError(f"layers[{i}].block_size", f"{spec.block_size} differs from the group's")
            if isinstance(spec, UniformTypeKVCacheSpecs) or not self.first.allocates_like(spec):
                message = f"{name[:QUOTED_CHARACTERS]!r} cannot share a block table with the first layer"
                raise InvalidArgumentError(f"layers[{i}]", message)

    @property
    def first(self) -> KVCacheSpec:
        """Spec of one layer: all allocate alike."""
        return self.layers[0][1]

    @property
    def page_size_bytes(self) -> int:
        """Bytes of all layers' share of a block."""
        return sum(spec.page_size_bytes for _, spec in self.layers)

    @property
    def content_size_bytes(self) -> int:
        """Bytes of these pages that are used."""
        return sum(spec.content_size_bytes for _, spec in self.layers)

    def max_blocks(self, limits: RequestLimits) -> int:
        """See `KVCacheSpec`."""
        return self.first.max_blocks(limits)


SPEC_KINDS: Final[dict[str, type[KVCacheSpec]]] = {
    kind.__name__: kind
    for kind in (
        FullAttentionSpec,
        MLAAttentionSpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
        ChunkedLocalAttentionSpec,
        MambaSpec,
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
    )
}
"""The kinds that a layer can be of, by name."""

KIND_NAMES: Final[dict[type[KVCacheSpec], str]] = {
    FullAttentionSpec: "full_attention",
    MLAAttentionSpec: "mla_attention",
    SinkFullAttentionSpec: "sink_full_attention",
    SlidingWindowSpec: "sliding_window",
    ChunkedLocalAttentionSpec: "chunked_local_attention",
    MambaSpec: "mamba",
    CrossAttentionSpec: "cross_attention",
    EncoderOnlyAttentionSpec: "encoder_only_attention",
}
"""What vLLM's events call each kind."""


def common_multiple_tokens(spans_tokens: Iterable[int], max_model_len: int) -> int:
    """The least number of tokens that is whole blocks of every span below max_model_len.

    Blocks that hold a whole request are left out: none of them is ever hit.
    """
    return math.lcm(*(span for span in spans_tokens if span < max_model_len))


def block_span_tokens(spec: KVCacheSpec, context_parallel_size: int) -> int:
    """Tokens of a request that one block covers over all ranks of context parallelism."""
    return spec.block_size * (context_parallel_size if allocation_spec(spec).is_sharded else 1)


def allocation_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec that says how a group's blocks are given: its own, or that of one of its layers."""
    return spec.first if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def state_size_bytes(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    """Bytes of a state: of all its parts, whose types are known."""
    return sum(math.prod(shape) * DTYPE_SIZES_BYTES[dtype] for shape, dtype in zip(shapes, dtypes, strict=True))


def num_draft_blocks(spec: KVCacheSpec) -> int:
    """Blocks of a table beyond those of its tokens, for the states after drafts; 0 for all kinds but one."""
    return spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0


def num_sink_tokens(spec: KVCacheSpec) -> int:
    """Sink tokens of a layer or a group; 0 for all kinds but one."""
    first = allocation_spec(spec)
    return first.sink_len if isinstance(first, SinkFullAttentionSpec) else 0


def differing_field(left: KVCacheSpec, right: KVCacheSpec) -> str:
    """Names the first field in which two specs differ ("type" if their kind does); empty if none does."""
    if type(left) is not type(right):
        return "type"
    return next((f.name for f in fields(left) if getattr(left, f.name) != getattr(right, f.name)), "")
