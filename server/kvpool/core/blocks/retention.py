"""Which full blocks of a sliding window are cached where a pool keeps them sparsely, as vLLM does since 0.32.

1. Of a window a hit of n tokens needs a tail: the blocks that hold the last sliding_window - 1 of them, and with EAGLE
   the one after. What lies in no tail that is hit takes a hash, and a place among what is evicted last, for nothing.
2. Kept are the tails of the multiples of `PoolConfig.retention_tokens`, if that is not 0; of where the prompt can be
   taken up again when it is sent again, or goes on; and of where a shared prefix ends that other groups had cached,
   which the request's newest look-up told (`Request.shared_prefix_boundary_tokens`). All rounded down to whole hits.
3. What was decided of a block when it became full is not looked at again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvpool.core.ids import GroupId
from kvpool.core.sessions.request import Request
from kvpool.core.specs.kinds import SlidingWindowSpec, allocation_spec
from kvpool.core.specs.pool_config import PoolConfig

Run = tuple[int, int]
"""Indices of consecutive blocks of a table, [first, end)."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule for one group.

    Attributes:
        span_tokens: Tokens that a block covers.
        alignment_tokens: Every hit is a multiple of so many.
        num_tail_blocks: Blocks of a tail, EAGLE's apart.
        num_eagle_blocks: Blocks after a hit that must be cached too.
        num_segment_blocks: A tail ends at each multiple of so many blocks; 0 for none.
    """

    span_tokens: int
    alignment_tokens: int
    num_tail_blocks: int
    num_eagle_blocks: int
    num_segment_blocks: int

    @classmethod
    def for_group(cls, config: PoolConfig, group_id: GroupId) -> "Retention | None":
        """The rule for a group of a pool; None if all of its blocks are kept."""
        spec = allocation_spec(config.groups[group_id].spec)
        if config.retention_tokens is None or not config.enable_caching or not isinstance(spec, SlidingWindowSpec):
            return None
        span = config.span_tokens(group_id)
        num_tail, num_eagle = -(-(spec.sliding_window - 1) // span), int(config.use_eagle)
        num_segment = config.retention_tokens // span
        if 0 < num_segment <= num_tail + num_eagle:
            return None
        return cls(span, config.hit_alignment, num_tail, num_eagle, num_segment)

    def runs(self, request: Request, first: int, end: int) -> list[Run]:
        """Of the request's blocks [first, end), those to be kept; in order, with gaps between them."""
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
        """How many blocks the hits have whose tails are kept; of the multiples, those with a tail near [first, end)."""
        if self.num_segment_blocks:
            per_segment = self.num_segment_blocks
            yield from range(max(first // per_segment, 1) * per_segment, end + per_segment, per_segment)
        for num_tokens in self._resumed_at(request.num_prompt_tokens):
            yield num_tokens // self.span_tokens
        if request.shared_prefix_boundary_tokens:
            yield self._aligned(request.shared_prefix_boundary_tokens) // self.span_tokens

    def _resumed_at(self, num_prompt_tokens: int) -> Iterable[int]:
        """The hits of the same prompt sent again, whose last token is never hit, and with EAGLE of one that goes on.

        With EAGLE a whole hit less is found, as the block after it must be cached, too. Without, one that goes on from
        whole blocks could hit all of them, and finds one hit less, as in the reference.
        """
        if not self.num_eagle_blocks:
            return (self._aligned(num_prompt_tokens - 1),)
        return {max(self._aligned(n) - self.alignment_tokens, 0) for n in (num_prompt_tokens - 1, num_prompt_tokens)}

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens // self.alignment_tokens * self.alignment_tokens
