"""Room that a request can take without any change of its pool: what most decodes do.

Between two blocks a decode takes a slot of a block that the request holds, fills no block and leaves none behind a
window. Whoever knows the request's tables can answer it: the pool at once, or the session from its own copy.
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
    """The rule for one group.

    Attributes:
        group_id: The group.
        spec: How its blocks are given.
        span_tokens: Tokens that a block covers.
        num_extra_blocks: Blocks of a table beyond those of its tokens.
        caches: Whether blocks that become full are cached.
        skips: Whether blocks fall behind a window.
        has_slots: Whether a request's tokens take room in its blocks; those of an encoder do not.
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
        """The rule for a group of a pool."""
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
        """Up to how many computed tokens, look-ahead included, a request can go without a change of this group.

        Args:
            num_blocks: Blocks of its table, those skipped included.
            num_cached_blocks: How many of the first are cached; if it is not known, fewer.
            num_skipped_blocks: How many of the first stand null; if it is not known, fewer.
        """
        span = self.span_tokens
        bound = (num_blocks - self.num_extra_blocks) * span if self.has_slots else _UNBOUND_TOKENS
        if self.caches and num_cached_blocks * span + span <= bound:
            bound = num_cached_blocks * span + span - 1
        if self.skips:
            bound = min(bound, self.spec.num_computed_to_skip((num_skipped_blocks + 1) * span))
        return bound


def is_plain(config: PoolConfig) -> bool:
    """Whether a pool has one group, whose blocks are kept and hold a slot a token, and no events."""
    room = Credit.for_group(config, GroupId(0))
    return len(config.groups) == 1 and room.has_slots and not room.skips and not config.makes_events


def fills_on_credit(config: PoolConfig) -> bool:
    """Whether a decode that fills a block need not ask: the next step caches the block, see `DeferredBlocks`.

    A block of one token is filled by the decode that needs it, which asks.
    """
    return config.enable_caching and config.hash_block_size > 1 and is_plain(config)
