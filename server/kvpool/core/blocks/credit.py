"""Credit: the number of tokens that a request can compute without any change of its pool, as most decodes do.

Most decodes take a slot in a block that the request already holds. They fill no block and leave none behind a window.
Any process that knows the request's tables can answer such a decode: the pool without an allocation, or the session
from its own copy of the tables.
"""

from dataclasses import dataclass
from typing import Final

from kvpool.core.ids import MAX_TOKENS, GroupId
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import CrossAttentionSpec, allocation_spec, num_draft_blocks
from kvpool.core.specs.pool_config import PoolConfig

_UNBOUND_TOKENS: Final = 2 * MAX_TOKENS


@dataclass(frozen=True, slots=True)
class Credit:
    """The credit rule of one group.

    Attributes:
        group_id: The group.
        spec: Spec that determines how blocks are allocated.
        span_tokens: Tokens per block.
        num_extra_blocks: Blocks of a table in addition to those of its tokens.
        caches: Whether full blocks are cached.
        skips: Whether blocks fall behind a window.
        has_slots: Whether a request's tokens occupy slots in its blocks. An encoder's tokens do not.
    """

    group_id: GroupId
    spec: KVCacheSpec
    span_tokens: int
    num_extra_blocks: int
    caches: bool
    skips: bool
    has_slots: bool

    @classmethod
    def for_group(cls, config: PoolConfig, group_id: GroupId) -> "Credit":
        """Returns the rule of a group."""
        spec = allocation_spec(config.groups[group_id].spec)
        return cls(
            group_id,
            spec,
            config.span_tokens(group_id),
            num_draft_blocks(spec),
            config.enable_caching,
            not spec.keeps_all,
            not isinstance(spec, CrossAttentionSpec),
        )

    def num_tokens(self, num_blocks: int, num_cached_blocks: int, num_skipped_blocks: int) -> int:
        """Number of computed tokens, look-ahead included, that a request can reach without a change of this group.

        Args:
            num_blocks: Blocks in the request's table, skipped ones included.
            num_cached_blocks: Number of leading cached blocks, or a lower bound.
            num_skipped_blocks: Number of leading null blocks, or a lower bound.
        """
        span = self.span_tokens
        bound = (num_blocks - self.num_extra_blocks) * span if self.has_slots else _UNBOUND_TOKENS
        if self.caches and num_cached_blocks * span + span <= bound:
            bound = num_cached_blocks * span + span - 1
        if self.skips:
            bound = min(bound, self.spec.num_computed_to_skip((num_skipped_blocks + 1) * span))
        return bound


def is_plain(config: PoolConfig) -> bool:
    """Whether a pool has one group, which keeps its blocks and has a slot per token, and makes no events."""
    room = Credit.for_group(config, GroupId(0))
    return len(config.groups) == 1 and room.has_slots and not room.skips and not config.makes_events


def fills_on_credit(config: PoolConfig) -> bool:
    """Whether a decode that fills a block needs no allocation call.

    The next step caches the block, see `DeferredBlocks`.

    With blocks of one token, each decode needs a new block and therefore an allocation call.
    """
    return config.enable_caching and config.hash_block_size > 1 and is_plain(config)
