"""Values of memory planning: options, errors, and the memory of every rank. All are frozen."""

import math
from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_BLOCKS
from kvpool.core.planning.grouping import Layers, block_size_bytes, layer_specs
from kvpool.core.specs.base import MambaCacheMode, RequestLimits
from kvpool.core.specs.pool_config import KVCacheGroup

GIB: Final = 2**30


class PlanError(InvalidArgumentError):
    """No plan can be made for the layers.

    Attributes:
        needed_bytes: Memory of one request of the maximum length on the rank at fault; 0 if the error is another one.
        available_bytes: Available memory.
        max_model_len: The requested maximum length, in tokens.
        estimated_max_model_len: The maximum length that fits, in tokens; 0 if none fits.
        rank: The rank at fault; None if the error is not about one rank.
    """

    def __init__(  # noqa: PLR0913 - the facts of one refusal
        self,
        reason: str,
        field: str,
        message: str,
        *,
        needed_bytes: int = 0,
        available_bytes: int = 0,
        max_model_len: int = 0,
        estimated_max_model_len: int = 0,
        rank: int | None = None,
    ) -> None:
        super().__init__(field, message, reason=reason)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.max_model_len = max_model_len
        self.estimated_max_model_len = estimated_max_model_len
        self.rank = rank


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The layers and the memory of one rank.

    Attributes:
        layers: Spec of each layer of the rank, in the order of the model.
        available_bytes: Memory available for the tensors.
    """

    layers: Layers
    available_bytes: int


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan.

    Attributes:
        max_model_len: Maximum number of tokens of a request.
        auto_fit_max_model_len: Use the longest length that fits, at most max_model_len.
        max_num_batched_tokens: Maximum number of tokens that one step computes.
        max_num_encoder_input_tokens: Maximum number of tokens that an encoder outputs for one request.
        num_blocks_override: Number of blocks, regardless of the memory; 0 for as many as fit.
        disable_hybrid_kv_cache_manager: Manage all layers as one kind.
        decode_context_parallel_size: Ranks over which decode spreads a request's tokens.
        prefill_context_parallel_size: Ranks over which prefill spreads a request's tokens.
        block_outermost: One buffer, in which a block has the pages of all layers of a group side by side, in place of a
            buffer for each layer of a group. Backends must accept pages that are not adjacent.
        mamba_cache_mode: States that a request of a Mamba group keeps. Pools keep those of `ALL`.
    """

    max_model_len: int
    auto_fit_max_model_len: bool = False
    max_num_batched_tokens: int = 2048
    max_num_encoder_input_tokens: int = 1500
    num_blocks_override: int = 0
    disable_hybrid_kv_cache_manager: bool = False
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    block_outermost: bool = False
    mamba_cache_mode: MambaCacheMode = MambaCacheMode.ALL

    def check(self) -> None:
        """Raises InvalidArgumentError if a number is out of range; names the field."""
        check_range("num_blocks_override", self.num_blocks_override, 0, MAX_BLOCKS)
        check_range("decode_context_parallel_size", self.decode_context_parallel_size, 1, 1024)
        check_range("prefill_context_parallel_size", self.prefill_context_parallel_size, 1, 1024)
        self.limits(self.max_model_len)

    def limits(self, max_model_len: int) -> RequestLimits:
        """Returns the limits of one request with this maximum length, in tokens."""
        return RequestLimits(
            max_model_len,
            self.max_num_batched_tokens,
            self.max_num_encoder_input_tokens,
            self.decode_context_parallel_size * self.prefill_context_parallel_size,
            self.mamba_cache_mode,
        )


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One buffer of a rank.

    Attributes:
        size_bytes: Size of the buffer: num_blocks times the distance from one block to the next.
        shared_by: Layers that store their pages in the buffer. Pages of one group do not overlap.
        offsets_bytes: Where in a block the page of each of these layers begins. Empty if a block is one page, of at
            most one layer per group; and in memory that ranks declare, whose layout the engine knows.
    """

    size_bytes: int
    shared_by: tuple[str, ...]
    offsets_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The memory that one rank must allocate.

    Attributes:
        num_blocks: Number of blocks, including the null block; equal on all ranks.
        tensors: The buffers.
        groups: The groups, each with the layers of this rank.
    """

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroup, ...]

    @property
    def block_size_bytes(self) -> int:
        """Bytes per block over all tensors."""
        return block_size_bytes(self.groups)

    @property
    def padding_bytes_per_block(self) -> tuple[int, ...]:
        """Unused bytes of a block, for each group that can hold the block."""
        return tuple(
            self.block_size_bytes - sum(spec.content_size_bytes for _, spec in layer_specs(group))
            for group in self.groups
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of all ranks.

    Attributes:
        configs: The memory that each rank must allocate, in rank order.
        groups: The groups, each with the layers of all ranks.
        max_model_len: The maximum length of a request that applies, in tokens.
        blocks_per_request: Blocks that a request of this length takes in all groups together.
        longest_request_tokens: The longest request that the pool can hold without the null block and sinks; at most
            max_model_len.
    """

    configs: tuple[KVCacheConfig, ...]
    groups: tuple[KVCacheGroup, ...]
    max_model_len: int
    blocks_per_request: int
    longest_request_tokens: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the pool, including the null block."""
        return self.configs[0].num_blocks

    @property
    def max_concurrency(self) -> float:
        """Number of requests of the maximum length that fit at once; infinity for a model without a KV cache."""
        return self.num_blocks / self.blocks_per_request if self.blocks_per_request else math.inf
