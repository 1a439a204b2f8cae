"""Base of all kinds of attention: pages, and the interface that allocation and planning use.

1. A spec validates its own numbers when it is created; the error's field is the attribute.
2. A page is one layer's bytes of one block. A size of 0 means "not declared". A spec without sizes can be allocated but
   not planned, and its page_size_bytes is 0.
3. All sizes are per rank: heads are the rank's own heads, and block_size is the number of tokens per block on the rank
   (under context parallelism, the rank's share of the tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_TOKENS

DTYPE_SIZES_BYTES: Final = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}
"""Size of one element, by torch's name of the type."""

MAX_BLOCK_SIZE_TOKENS: Final = 2**20
MAX_DIMENSION: Final = 2**24
MAX_PAGE_BYTES: Final = 2**48
QUOTED_CHARACTERS: Final = 64
"""Maximum number of characters of a caller's text that an error message repeats."""


def dtype_size_bytes(field: str, dtype: str) -> int:
    """Returns the size of one element of a type.

    Raises:
        InvalidArgumentError: The type is unknown. The error names `field` and the known types.
    """
    if dtype not in DTYPE_SIZES_BYTES:
        raise InvalidArgumentError(
            field, f"{dtype[:QUOTED_CHARACTERS]!r} is not known; known: {', '.join(DTYPE_SIZES_BYTES)}"
        )
    return DTYPE_SIZES_BYTES[dtype]


def check_page(content_size_bytes: int, stated_size_bytes: int) -> None:
    """Checks the size of a page.

    Args:
        content_size_bytes: Bytes of its content.
        stated_size_bytes: The size to which the spec pads it; 0 for that of the content.

    Raises:
        InvalidArgumentError: The page is too large, or smaller than its content.
    """
    if content_size_bytes > MAX_PAGE_BYTES:
        raise InvalidArgumentError(
            "page_size_bytes", f"one page takes {content_size_bytes} bytes, over {MAX_PAGE_BYTES}"
        )
    if stated_size_bytes:
        check_range("page_size_padded", stated_size_bytes, content_size_bytes, MAX_PAGE_BYTES)


class MambaCacheMode(Enum):
    """States that a request of a Mamba group keeps, besides those of drafts, as memory is planned for them."""

    ALL = "all"
    """Those that the tokens of a step need: the state before it, and the state after each of its blocks."""

    ALIGN = "align"
    """Two: the state before a step and the state after it, as in vLLM 0.32 with prefix caching."""

    NONE = "none"
    """One, which steps overwrite, as in vLLM 0.32 without prefix caching."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request, which bound its memory.

    Attributes:
        max_model_len: Maximum number of tokens per request.
        max_num_batched_tokens: Maximum number of tokens per step, over all requests.
        max_num_encoder_input_tokens: Maximum number of tokens that an encoder produces for one request.
        context_parallel_size: Number of ranks over which a request's tokens are sharded (decode times prefill).
        mamba_cache_mode: States that a request of a Mamba group keeps.
    """

    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_encoder_input_tokens: int = 1500
    context_parallel_size: int = 1
    mamba_cache_mode: MambaCacheMode = MambaCacheMode.ALL

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens"):
            check_range(name, getattr(self, name), 1, MAX_TOKENS)
        check_range("max_num_encoder_input_tokens", self.max_num_encoder_input_tokens, 0, MAX_TOKENS)
        check_range("context_parallel_size", self.context_parallel_size, 1, 65_536)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Base class of the kinds of attention. Each kind defines its page and how the page grows.

    Attributes:
        block_size: Tokens per block on one rank, [1, 2^20].
    """

    block_size: int

    is_sharded: ClassVar[bool] = True
    """Whether context parallelism shards the tokens, so that a block on `n` ranks covers n * block_size tokens."""
    keeps_all: ClassVar[bool] = True
    """Whether every token is attended to until the end: num_skipped_tokens is 0."""
    keeps_tokens: ClassVar[bool] = True
    """Whether the cache holds the request's own tokens, instead of only an encoder's tokens or nothing."""
    has_token_slots: ClassVar[bool] = True
    """Whether each token has its own slot. A draft model's state in the last slot depends on the next token."""
    allocation_fields: ClassVar[tuple[str, ...]] = ("block_size",)
    """Fields that determine at which tokens blocks are allocated and freed."""

    def __post_init__(self) -> None:
        check_range("block_size", self.block_size, 1, MAX_BLOCK_SIZE_TOKENS)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer of a block; 0 if sizes are not declared."""
        raise NotImplementedError

    @property
    def content_size_bytes(self) -> int:
        """Used bytes of a page, without padding."""
        return self.page_size_bytes

    @property
    def is_cached(self) -> bool:
        """Whether full blocks can be hit. A group that is not cached takes no part in hits, nor in their lengths."""
        return True

    @property
    def num_replayed_tokens(self) -> int:
        """Number of tokens at the end of a hit that the engine computes again, as the group has nothing of the hit."""
        return 0

    def span_tokens(self, context_parallel_size: int) -> int:
        """Tokens of a request that one block covers, over all ranks of context parallelism."""
        return self.block_size * (context_parallel_size if self.is_sharded else 1)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Number of leading tokens that no token from `num_computed_tokens` on attends to.

        Never decreases as `num_computed_tokens` increases.
        """
        del num_computed_tokens
        return 0

    def num_unread_tokens(self, num_computed_tokens: int) -> int:
        """Number of leading tokens of a hit that nothing reads: those skipped, and those that are only retained."""
        return self.num_skipped_tokens(num_computed_tokens)

    def num_computed_to_skip(self, num_tokens: int) -> int:
        """Smallest number of computed tokens at which `num_tokens`, at least 1, are skipped.

        If they are never skipped, the result exceeds every possible number of tokens. The inverse of
        `num_skipped_tokens`.
        """
        del num_tokens
        return 2 * MAX_TOKENS

    def max_blocks(self, limits: RequestLimits) -> int:
        """Maximum number of blocks that one request holds at a time."""
        return -(-limits.max_model_len // self.span_tokens(limits.context_parallel_size))

    def merged_with(self, others: Sequence["KVCacheSpec"]) -> "KVCacheSpec | None":
        """Returns the spec under which this layer and the others can share a group; None if there is none."""
        return self if all(other == self for other in others) else None

    def allocates_like(self, other: "KVCacheSpec") -> bool:
        """Whether both specs allocate and free blocks at the same tokens, so that one block table serves both."""
        return type(self) is type(other) and all(
            getattr(self, name) == getattr(other, name) for name in self.allocation_fields
        )


@dataclass(frozen=True, slots=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of every token, (2, block_size, num_kv_heads, head_size) or in the backend's layout.

    A page holds one state per `tokens_per_state` tokens, in each of its heads.

    Attributes:
        num_kv_heads: Key and value heads on one rank; 0 if not declared.
        head_size: Elements of a head's key; 0 if not declared.
        dtype: Element type by torch's name; empty if not declared.
        head_size_v: Elements of a head's value; 0 for head_size.
        page_size_padded: Bytes to which the page is padded; 0 for none.
        num_head_slots: Heads of a page, if the backend does not store one per key and value head; 0 for num_kv_heads.
        state_content_bytes: Bytes of one state in one head, if they are not those of its elements: quantised caches
            pack elements, and store scales beside them. 0 for the elements'.
        tokens_per_state: Tokens that one state stands for, a divisor of block_size; 0 for 1.
    """

    num_kv_heads: int = 0
    head_size: int = 0
    dtype: str = ""
    head_size_v: int = 0
    page_size_padded: int = 0
    num_head_slots: int = 0
    state_content_bytes: int = 0
    tokens_per_state: int = 1

    is_latent: ClassVar[bool] = False
    """Whether a state is one vector of head_size elements, instead of a key and a value."""

    def __post_init__(self) -> None:
        KVCacheSpec.__post_init__(self)
        for name in ("num_kv_heads", "head_size", "head_size_v", "num_head_slots", "state_content_bytes"):
            check_range(name, getattr(self, name), 0, MAX_DIMENSION)
        if self.head_size_v == self.head_size:  # one representation, so that equal layers compare equal
            object.__setattr__(self, "head_size_v", 0)
        if not self.tokens_per_state:
            object.__setattr__(self, "tokens_per_state", 1)
        check_range("tokens_per_state", self.tokens_per_state, 1, self.block_size)
        if self.block_size % self.tokens_per_state:
            raise InvalidArgumentError(
                "tokens_per_state", f"{self.tokens_per_state} does not divide block_size {self.block_size}"
            )
        if self.dtype:
            dtype_size_bytes("dtype", self.dtype)
        check_page(self.content_size_bytes, self.page_size_padded)

    @property
    def content_size_bytes(self) -> int:
        """Bytes of the states of block_size tokens."""
        return self.block_size // self.tokens_per_state * self.state_size_bytes

    @property
    def state_size_bytes(self) -> int:
        """Bytes of one state in all heads: one token's keys and values, unless a state stands for several tokens."""
        return (self.num_head_slots or self.num_kv_heads) * (self.state_content_bytes or self.head_elements_bytes)

    @property
    def head_elements_bytes(self) -> int:
        """Bytes of the elements of one state in one head."""
        elements = self.head_size if self.is_latent else self.head_size + (self.head_size_v or self.head_size)
        return elements * DTYPE_SIZES_BYTES.get(self.dtype, 0)

    @property
    def page_size_bytes(self) -> int:
        """See `KVCacheSpec`."""
        return self.page_size_padded or self.content_size_bytes
