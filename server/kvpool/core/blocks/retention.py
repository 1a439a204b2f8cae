"""Sparse caching of sliding windows and states: selects the full blocks to cache, as vLLM does since 0.32.

1. A hit of n tokens needs a tail of a window: the blocks that hold the last sliding_window - 1 of the n tokens and,
   with EAGLE, the block after them; of states, the last one. A block outside all tails would occupy a hash and a late
   place in the eviction order without ever being hit.
2. Three kinds of tails are kept: those at multiples of `PoolConfig.retention_tokens`, if that is not 0; those at which
   the prompt can be resumed when it is sent again or continued; and those at the end of a shared prefix that other
   groups had cached, which the request's most recent look-up found (`Request.shared_prefix_boundary_tokens`), and a
   block before it where `PoolConfig.keeps_block_before_boundary` says so: a request that leaves the prefix there lacks
   the block after the prefix, which EAGLE needs. All positions are rounded down to whole hits.
3. The decision about a block is made when the block becomes full, and is final.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvpool.core.ids import GroupId
from kvpool.core.sessions.request import Request
from kvpool.core.specs.kinds import SPARSE_KINDS, SlidingWindowSpec, allocation_spec
from kvpool.core.specs.pool_config import PoolConfig

Run = tuple[int, int]
"""Indices of consecutive blocks of a table, [first, end)."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention rule of one group.

    Attributes:
        span_tokens: Tokens per block.
        alignment_tokens: Every hit is a multiple of this number of tokens.
        block_tokens: Common multiple of the blocks of all groups.
        num_tail_blocks: Blocks per tail, without the block for EAGLE.
        num_eagle_blocks: Blocks after a hit that must be cached too.
        num_segment_blocks: A tail ends at each multiple of this number of blocks; 0 for none.
        drops_block: Whether hits end earlier, for EAGLE.
        keeps_block_before_boundary: Whether a tail also ends a block before a shared prefix: see `PoolConfig`.
    """

    span_tokens: int
    alignment_tokens: int
    block_tokens: int
    num_tail_blocks: int
    num_eagle_blocks: int
    num_segment_blocks: int
    drops_block: bool
    keeps_block_before_boundary: bool

    @classmethod
    def for_group(cls, config: PoolConfig, group_id: GroupId) -> "Retention | None":
        """Returns the rule of a group; None if all blocks of the group are cached."""
        spec = allocation_spec(config.groups[group_id].spec)
        is_cached = config.enable_caching and spec.is_cached
        if config.retention_tokens is None or not is_cached or not isinstance(spec, SPARSE_KINDS):
            return None
        span = config.span_tokens(group_id)
        num_tail, num_eagle = 1, 0
        if isinstance(spec, SlidingWindowSpec):
            num_tail, num_eagle = -(-(spec.sliding_window - 1) // span), config.num_eagle_blocks(group_id)
        num_segment = config.retention_tokens // span
        if 0 < num_segment <= num_tail + num_eagle:
            return None
        keeps_before = bool(num_eagle) and config.keeps_block_before_boundary
        alignment, common = config.hit_alignment, config.block_alignment
        return cls(span, alignment, common, num_tail, num_eagle, num_segment, config.use_eagle, keeps_before)

    def runs(self, request: Request, first: int, end: int) -> list[Run]:
        """Returns the blocks in [first, end) that are to be cached, as ascending runs with gaps between them."""
        runs: list[Run] = []
        for block in sorted(self._ends(request, first, end)):
            start = max(block - self.num_tail_blocks, first)
            stop = min(block + self.num_eagle_blocks, end)
            if start >= stop:
                continue
            if runs and start <= runs[-1][1]:
                start = runs.pop()[0]
            runs.append((start, stop))
        return runs

    def _ends(self, request: Request, first: int, end: int) -> Iterator[int]:
        """Yields the lengths, in blocks, of hits whose tails are kept.

        Multiples are limited to tails near [first, end).
        """
        if self.num_segment_blocks:
            per_segment = self.num_segment_blocks
            yield from range(max(first // per_segment, 1) * per_segment, end + per_segment, per_segment)
        for num_tokens in self._resumed_at(request.num_prompt_tokens):
            yield num_tokens // self.span_tokens
        if request.shared_prefix_boundary_tokens:
            yield self._aligned(request.shared_prefix_boundary_tokens) // self.span_tokens
            if self.keeps_block_before_boundary:
                before = request.shared_prefix_boundary_tokens - self.span_tokens
                yield self._aligned(before) // self.span_tokens

    def keeps_segment(self, num_tokens: int) -> bool:
        """Whether a tail at `num_tokens` tokens, whole blocks, is kept wherever a request has it."""
        num_blocks = num_tokens // self.span_tokens
        return self.num_segment_blocks > 0 and num_blocks % self.num_segment_blocks == 0

    def _resumed_at(self, num_prompt_tokens: int) -> Iterable[int]:
        """Returns the hits of the same prompt when it is sent again and, with EAGLE, when it is continued.

        The last token of a prompt is never part of a hit. With EAGLE the hit is one alignment shorter, because the
        block after the hit must be cached too. Without EAGLE, a prompt that is continued from whole blocks could hit
        all of them, but finds one alignment less, as in vLLM.
        """
        if not self.drops_block:
            return (self._aligned(num_prompt_tokens - 1),)
        common = self.block_tokens
        return {max(n // common * common - common, 0) for n in (num_prompt_tokens - 1, num_prompt_tokens)}

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens // self.alignment_tokens * self.alignment_tokens
