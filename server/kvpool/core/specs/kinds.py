"""Kinds of attention: one frozen value per kind, which defines what a layer keeps for its tokens.

`num_skipped_tokens` is all that allocation needs to know about a kind: the number of leading tokens that no later token
attends to. Look-up, freeing behind a window and caching follow from it; see `group_manager` and `prefix_search`.

Source: the kinds and their memory sizes are those of vLLM's kv_cache_interface.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Final

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_TOKENS
from kvpool.core.specs.base import (
    DTYPE_SIZES_BYTES,
    MAX_DIMENSION,
    QUOTED_CHARACTERS,
    AttentionSpec,
    KVCacheSpec,
    MambaCacheMode,
    RequestLimits,
    check_page,
    dtype_size_bytes,
)

FP8_DS_MLA: Final = "fp8_ds_mla"
NVFP4_DS_MLA: Final = "nvfp4_ds_mla"
DS_MLA_TOKEN_BYTES: Final = {FP8_DS_MLA: 656, NVFP4_DS_MLA: 352}
"""By layout of FlashMLA for DeepSeek V3.2: bytes per token. 512 values, their scales, and a rotary part of 64 values.

In fp8_ds_mla: fp8 values, 4 float32 scales, a bfloat16 rotary part.
"""
MAX_STATE_TENSORS: Final = 16
MAX_STATE_DIMENSIONS: Final = 8
MAX_LAYERS: Final = 4096
MAX_SINK_TOKENS: Final = 2**16
"""Bound of the blocks that a new pool takes for sinks at once, in one group."""


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    """Every token attends to all tokens before it.

    Attributes:
        sliding_window: The layers' window in tokens, if all tokens are kept nevertheless (hybrid management is off).
        attention_chunk_size: The layers' chunk size in tokens, if all tokens are kept nevertheless.
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
        """Merges specs that differ only in their windows or chunks; at most one distinct value is allowed."""
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
        """True for all kinds of full attention with the same number of sink tokens."""
        return (
            isinstance(other, FullAttentionSpec)
            and self.block_size == other.block_size
            and num_sink_tokens(self) == num_sink_tokens(other)
        )


@dataclass(frozen=True, slots=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one latent vector per state, (block_size, head_size), instead of keys and values.

    Attributes:
        cache_dtype_str: A layout of `DS_MLA_TOKEN_BYTES`, whose size state_content_bytes then is, unless it is given;
            else empty.
    """

    num_kv_heads: int = 1
    cache_dtype_str: str = ""

    is_latent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", 1)
        if self.cache_dtype_str not in ("", *DS_MLA_TOKEN_BYTES):
            known = ", ".join(DS_MLA_TOKEN_BYTES)
            message = f"{self.cache_dtype_str[:QUOTED_CHARACTERS]!r} is not known; known: {known}"
            raise InvalidArgumentError("cache_dtype_str", message)
        if self.cache_dtype_str and not self.state_content_bytes:
            object.__setattr__(self, "state_content_bytes", DS_MLA_TOKEN_BYTES[self.cache_dtype_str])
        FullAttentionSpec.__post_init__(self)


@dataclass(frozen=True, slots=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with attention sinks that all requests share.

    Attributes:
        sink_len: Number of sink tokens; whole blocks of the pool are reserved for them.
    """

    sink_len: int = 0

    def __post_init__(self) -> None:
        FullAttentionSpec.__post_init__(self)
        check_range("sink_len", self.sink_len, 1, MAX_SINK_TOKENS)
        if self.sink_len % self.block_size:
            raise InvalidArgumentError("sink_len", f"{self.sink_len} is not a multiple of block_size {self.block_size}")


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(AttentionSpec):
    """Every token attends to itself and the sliding_window - 1 tokens before it.

    Attributes:
        sliding_window: Tokens, at least 1.
        extra_retained_tokens: Tokens before the window that a running request keeps although no token attends to them:
            draft models with several modules compute the end of a sequence again. A hit does not need them.
    """

    sliding_window: int = 0
    extra_retained_tokens: int = 0

    keeps_all: ClassVar[bool] = False
    allocation_fields: ClassVar[tuple[str, ...]] = ("block_size", "sliding_window", "extra_retained_tokens")

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        check_range("sliding_window", self.sliding_window, 1, MAX_TOKENS)
        check_range("extra_retained_tokens", self.extra_retained_tokens, 0, MAX_TOKENS)

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        """The next token, at num_computed_tokens, attends to the sliding_window - 1 tokens before it."""
        return max(num_computed_tokens - self.sliding_window + 1, 0)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """The tokens before the window, without those that are retained."""
        return max(num_computed_tokens - self.sliding_window + 1 - self.extra_retained_tokens, 0)

    def num_computed_to_skip(self, num_tokens: int) -> int:
        """See `KVCacheSpec`."""
        return num_tokens + self.sliding_window - 1 + self.extra_retained_tokens

    def max_blocks(self, limits: RequestLimits) -> int:
        """The window and the tokens of one step, plus one block because a window can begin within a block."""
        span = self.block_size * limits.context_parallel_size
        tokens = self.sliding_window - 1 + self.extra_retained_tokens + limits.max_num_batched_tokens
        return -(-min(tokens, limits.max_model_len) // span) + 1


@dataclass(frozen=True, slots=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A sliding window over latent vectors, as `MLAAttentionSpec` has them.

    Attributes:
        bounded_replay: Whether the window takes no part in hits: after a hit, the engine computes the last
            sliding_window tokens of the hit again, into new blocks.
    """

    num_kv_heads: int = 1
    bounded_replay: bool = False

    is_latent: ClassVar[bool] = True
    allocation_fields: ClassVar[tuple[str, ...]] = (*SlidingWindowSpec.allocation_fields, "bounded_replay")

    def __post_init__(self) -> None:
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", 1)
        SlidingWindowSpec.__post_init__(self)

    @property
    def is_cached(self) -> bool:
        """See `KVCacheSpec`."""
        return not self.bounded_replay

    @property
    def num_replayed_tokens(self) -> int:
        """See `KVCacheSpec`."""
        return self.sliding_window if self.bounded_replay else 0


@dataclass(frozen=True, slots=True)
class CircularBufferSpec(AttentionSpec):
    """The last block_size tokens of a request, in one block that the request writes round and round.

    The tokens that are still to be compressed into one state, for example. The contents of the block change as long as
    the request runs, so they are never cached.
    """

    is_latent: ClassVar[bool] = True
    is_sharded: ClassVar[bool] = False
    has_token_slots: ClassVar[bool] = False

    @property
    def is_cached(self) -> bool:
        """No: the block is never full."""
        return False

    def span_tokens(self, context_parallel_size: int) -> int:
        """One block covers any request."""
        del context_parallel_size
        return MAX_TOKENS


@dataclass(frozen=True, slots=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Every token attends to the tokens before it in its own chunk: [n * size, (n + 1) * size).

    Attributes:
        attention_chunk_size: Tokens, at least 1.
    """

    attention_chunk_size: int = 0

    keeps_all: ClassVar[bool] = False
    allocation_fields: ClassVar[tuple[str, ...]] = ("block_size", "attention_chunk_size")

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        check_range("attention_chunk_size", self.attention_chunk_size, 1, MAX_TOKENS)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All chunks before the chunk of the next token."""
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    def num_computed_to_skip(self, num_tokens: int) -> int:
        """See `KVCacheSpec`."""
        return -(-num_tokens // self.attention_chunk_size) * self.attention_chunk_size

    def max_blocks(self, limits: RequestLimits) -> int:
        """A chunk and the tokens of one step, plus one block if a chunk can begin within a block."""
        span = self.block_size * limits.context_parallel_size
        tokens = min(self.attention_chunk_size + limits.max_num_batched_tokens, limits.max_model_len)
        blocks = -(-tokens // span) + (1 if self.attention_chunk_size % span else 0)
        return min(blocks, -(-limits.max_model_len // span))


@dataclass(frozen=True, slots=True)
class MambaSpec(KVCacheSpec):
    """A state that every token updates. A block holds the state after the last computed token of the block.

    Attributes:
        shapes: Shape of each part of the state (convolution, recurrence) on one rank; empty if not declared. At most 16
            parts of 8 dimensions.
        dtypes: Element type of each part.
        page_size_padded: Bytes to which the page is padded; 0 for none.
        mamba_type: Name of the kernel ("mamba1", "mamba2", "gdn_attention", ...), for the worker; empty if not
            declared.
        num_speculative_blocks: Blocks kept after the last token, for the states after each draft token.
        num_prefill_checkpoint_blocks: Blocks for states within a step of a prompt, which planned memory has room for in
            `MambaCacheMode.ALIGN`.
        only_step_ends: Whether only the state at the end of each step is kept; the other blocks of the step's tokens
            are null. As vLLM's mamba_cache_mode "align".
        prefill_checkpoint_alignment: With only_step_ends, the kernel also writes the state at the last block boundary
            within a step, if this is a multiple of this number of tokens after the start of the step; 0 if it cannot.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    page_size_padded: int = 0
    mamba_type: str = ""
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    only_step_ends: bool = False
    prefill_checkpoint_alignment: int = 0

    is_sharded: ClassVar[bool] = False
    keeps_all: ClassVar[bool] = False
    has_token_slots: ClassVar[bool] = False
    allocation_fields: ClassVar[tuple[str, ...]] = (
        "block_size",
        "num_speculative_blocks",
        "num_prefill_checkpoint_blocks",
        "only_step_ends",
        "prefill_checkpoint_alignment",
    )

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
        for name in ("num_speculative_blocks", "num_prefill_checkpoint_blocks"):
            check_range(name, getattr(self, name), 0, 1024)
        check_range("prefill_checkpoint_alignment", self.prefill_checkpoint_alignment, 0, MAX_TOKENS)
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
        """The states of `MambaCacheMode`, plus those of drafts."""
        if self.only_step_ends or limits.mamba_cache_mode is MambaCacheMode.ALIGN:
            return 2 + self.num_speculative_blocks + self.num_prefill_checkpoint_blocks
        if limits.mamba_cache_mode is MambaCacheMode.NONE:
            return 1 + self.num_speculative_blocks
        num_states = 1 + -(-limits.max_num_batched_tokens // self.block_size)
        return min(num_states, -(-limits.max_model_len // self.block_size)) + self.num_speculative_blocks


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(AttentionSpec):
    """Decoder layers that attend to the encoder's output: keys and values of encoder tokens, written once."""

    is_sharded: ClassVar[bool] = False
    keeps_tokens: ClassVar[bool] = False

    def max_blocks(self, limits: RequestLimits) -> int:
        """The blocks of the encoder's tokens."""
        return -(-limits.max_num_encoder_input_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Encoder layers, which process all tokens at once and cache nothing."""

    keeps_tokens: ClassVar[bool] = False

    def max_blocks(self, limits: RequestLimits) -> int:
        """Zero: nothing is cached."""
        del limits
        return 0


@dataclass(frozen=True, slots=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one kind with one block table, whose pages differ in size because their hidden sizes differ.

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
                raise InvalidArgumentError(f"layers[{i}]", f"{name[:QUOTED_CHARACTERS]!r} occurs twice")
            names.add(name)
            if spec.block_size != self.block_size:
                raise InvalidArgumentError(f"layers[{i}].block_size", f"{spec.block_size} differs from the group's")
            if isinstance(spec, UniformTypeKVCacheSpecs) or not self.first.allocates_like(spec):
                message = f"{name[:QUOTED_CHARACTERS]!r} cannot share a block table with the first layer"
                raise InvalidArgumentError(f"layers[{i}]", message)

    @property
    def first(self) -> KVCacheSpec:
        """Spec of the first layer. All layers allocate alike."""
        return self.layers[0][1]

    @property
    def page_size_bytes(self) -> int:
        """Bytes of all layers of a block."""
        return sum(spec.page_size_bytes for _, spec in self.layers)

    @property
    def content_size_bytes(self) -> int:
        """Used bytes of these pages."""
        return sum(spec.content_size_bytes for _, spec in self.layers)

    def max_blocks(self, limits: RequestLimits) -> int:
        """See `KVCacheSpec`."""
        return self.first.max_blocks(limits)


KIND_NAMES: Final[dict[type[KVCacheSpec], str]] = {
    FullAttentionSpec: "full_attention",
    MLAAttentionSpec: "mla_attention",
    SinkFullAttentionSpec: "sink_full_attention",
    SlidingWindowSpec: "sliding_window",
    SlidingWindowMLASpec: "sliding_window_mla",
    CircularBufferSpec: "circular_buffer",
    ChunkedLocalAttentionSpec: "chunked_local_attention",
    MambaSpec: "mamba",
    CrossAttentionSpec: "cross_attention",
    EncoderOnlyAttentionSpec: "encoder_only_attention",
}
"""The kinds of layers, and their names in vLLM's events and in the wire format."""

SPARSE_KINDS: Final = (SlidingWindowSpec, MambaSpec)
"""The kinds whose blocks `PoolConfig.retention_tokens` selects."""

SPEC_KINDS: Final = {kind.__name__: kind for kind in KIND_NAMES}
"""The kinds of layers, by the name of their class."""


def common_multiple_tokens(spans_tokens: Iterable[int], max_model_len: int) -> int:
    """Returns the smallest number of tokens that is a multiple of every span below max_model_len.

    Blocks that can hold a whole request are excluded: they are never hit.
    """
    return math.lcm(*(span for span in spans_tokens if span < max_model_len))


def rare_hits(spans_tokens: Iterable[int], max_model_len: int) -> str:
    """Describes that hits end at multiples of more tokens than the largest block spans; empty if they do not."""
    spans = sorted({span for span in spans_tokens if span < max_model_len})
    multiple = common_multiple_tokens(spans, max_model_len)
    if not spans or multiple == spans[-1]:
        return ""
    return (
        f"groups have blocks of {', '.join(f'{span:,}' for span in spans)} tokens, so prefixes are hit in multiples of"
        f" {multiple:,} tokens only: choose block sizes of which the largest is a multiple of the others"
    )


def block_span_tokens(spec: KVCacheSpec, context_parallel_size: int) -> int:
    """Tokens of a request that one block covers, over all ranks of context parallelism."""
    return allocation_spec(spec).span_tokens(context_parallel_size)


def allocation_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Returns the spec that determines how a group's blocks are allocated: its own, or that of one of its layers."""
    return spec.first if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def state_size_bytes(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    """Bytes of all parts of a state. The element types must be known."""
    return sum(math.prod(shape) * DTYPE_SIZES_BYTES[dtype] for shape, dtype in zip(shapes, dtypes, strict=True))


def num_draft_blocks(spec: KVCacheSpec) -> int:
    """Number of blocks of a table in addition to those of its tokens, for states after drafts; 0 except for Mamba."""
    return spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0


def has_gaps(spec: KVCacheSpec) -> bool:
    """Whether a table has null blocks between others: a group keeps only the states at the ends of steps."""
    return isinstance(spec, MambaSpec) and spec.only_step_ends


def checkpoint_alignment(spec: KVCacheSpec) -> int:
    """See `MambaSpec.prefill_checkpoint_alignment`; 0 for other kinds."""
    return spec.prefill_checkpoint_alignment if isinstance(spec, MambaSpec) else 0


def num_sink_tokens(spec: KVCacheSpec) -> int:
    """Sink tokens of a layer or a group; 0 except for attention with sinks."""
    first = allocation_spec(spec)
    return first.sink_len if isinstance(first, SinkFullAttentionSpec) else 0


def differing_field(left: KVCacheSpec, right: KVCacheSpec) -> str:
    """Returns the first field in which two specs differ ("type" if their kinds do); empty if they are equal."""
    if type(left) is not type(right):
        return "type"
    return next((f.name for f in fields(left) if getattr(left, f.name) != getattr(right, f.name)), "")
