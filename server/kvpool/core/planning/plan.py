"""What a plan is asked, and what it says: options, refusals, and the memory of every rank. Frozen values."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_BLOCKS
from kvpool.core.planning.grouping import Layers, block_size_bytes, layer_specs
from kvpool.core.specs.base import RequestLimits
from kvpool.core.specs.pool_config import KVCacheGroup

GIB: Final = 2**30


class FitCheck(Enum):
    """What counts when it is checked that one request of the longest length fits."""

    WHOLE_REQUEST = "whole_request"
    """The blocks that it takes in all groups, beside those that are set aside: the null block, and sinks."""

    FIRST_GROUP = "first_group"
    """Only those of the first group, as vLLM 0.14.1. Of a model whose first group has a window, lengths pass that no
    pool of this size can ever serve."""


class PlanError(InvalidArgumentError):
    """The layers cannot be laid out.

    Attributes:
        needed_bytes: Memory that one request of the longest length takes on the rank at fault; 0 if not about that.
        available_bytes: Memory that there is.
        max_model_len: The longest length asked for, in tokens.
        estimated_max_model_len: The longest that fits; 0 for none.
        rank: The rank at fault; None if it is not one rank's.
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
    """What one rank brings.

    Attributes:
        layers: Spec of each of its layers, in the model's order.
        available_bytes: Memory that its tensors may take.
    """

    layers: Layers
    available_bytes: int


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is asked of a plan.

    Attributes:
        max_model_len: Most tokens a request may have.
        auto_fit_max_model_len: Take the longest that fits instead, at most max_model_len.
        max_num_batched_tokens: Most tokens one step computes.
        max_num_encoder_input_tokens: Most tokens an encoder puts out for one request.
        num_blocks_override: Blocks to make, whatever there is room for; 0 for as many as there is.
        disable_hybrid_kv_cache_manager: Manage all layers as one kind.
        decode_context_parallel_size: Ranks over which decoding spreads a request's tokens.
        prefill_context_parallel_size: Ranks over which prefill spreads them.
        fit_check: What counts when it is checked that one request fits.
    """

    max_model_len: int
    auto_fit_max_model_len: bool = False
    max_num_batched_tokens: int = 2048
    max_num_encoder_input_tokens: int = 1500
    num_blocks_override: int = 0
    disable_hybrid_kv_cache_manager: bool = False
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    fit_check: FitCheck = FitCheck.WHOLE_REQUEST

    def __post_init__(self) -> None:
        check_range("num_blocks_override", self.num_blocks_override, 0, MAX_BLOCKS)
        check_range("decode_context_parallel_size", self.decode_context_parallel_size, 1, 1024)
        check_range("prefill_context_parallel_size", self.prefill_context_parallel_size, 1, 1024)
        self.limits(self.max_model_len)

    def limits(self, max_model_len: int) -> RequestLimits:
        """What bounds one request, with this longest length."""
        return RequestLimits(
            max_model_len,
            self.max_num_batched_tokens,
            self.max_num_encoder_input_tokens,
            self.decode_context_parallel_size * self.prefill_context_parallel_size,
        )


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One buffer of a rank.

    Attributes:
        size_bytes: Its size: num_blocks pages.
        shared_by: The layers whose pages lie in it, at most one of each group.
    """

    size_bytes: int
    shared_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """What one rank is to allocate.

    Attributes:
        num_blocks: Blocks, the null block included; the same on all ranks.
        tensors: The buffers.
        groups: The groups, with the layers that the rank has.
    """

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroup, ...]

    @property
    def block_size_bytes(self) -> int:
        """Bytes that a block takes in all tensors."""
        return block_size_bytes(self.groups)

    @property
    def padding_bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of a block that hold nothing when it is a group's, group by group."""
        return tuple(
            self.block_size_bytes - sum(spec.content_size_bytes for _, spec in layer_specs(group))
            for group in self.groups
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of all ranks.

    Attributes:
        configs: What each rank is to allocate, in the order of the ranks.
        groups: The groups, with the layers of all ranks.
        max_model_len: The longest length in force, in tokens.
        blocks_per_request: Blocks that a request of this length takes, in all groups together.
        longest_request_tokens: The longest request that the pool can hold, the null block and sinks set aside; at most
            max_model_len.
    """

    configs: tuple[KVCacheConfig, ...]
    groups: tuple[KVCacheGroup, ...]
    max_model_len: int
    blocks_per_request: int
    longest_request_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self.configs[0].num_blocks

    @property
    def max_concurrency(self) -> float:
        """Requests of the longest length that fit at a time; infinity for a model without a cache."""
        return self.num_blocks / self.blocks_per_request if self.blocks_per_request else math.inf
