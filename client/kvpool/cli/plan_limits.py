"""What limits the requests of a plan: their number by length, and where hits end."""

from dataclasses import dataclass
from typing import Final

from kvpool.core.planning.plan import Plan, PlanOptions
from kvpool.core.specs import kinds

_LENGTHS: Final = tuple(4**power for power in range(2, 16))
"""Lengths of requests that are reported, in tokens, as far as they are shorter than the longest one."""


@dataclass(frozen=True, slots=True)
class Load:
    """As many equal requests as fit at once.

    Attributes:
        request_tokens: Length of each request.
        blocks_per_request: Blocks that each one needs, in all groups.
        num_requests: Number of requests that fit.
    """

    request_tokens: int
    blocks_per_request: int
    num_requests: int

    @property
    def num_tokens(self) -> int:
        """Tokens of these requests together."""
        return self.request_tokens * self.num_requests


def num_request_blocks(plan: Plan, options: PlanOptions) -> int:
    """Number of blocks that requests can have: all but the null block and those of sinks."""
    ranks = options.limits(plan.max_model_len).context_parallel_size
    specs = [group.spec for group in plan.groups]
    sinks = sum(kinds.num_sink_tokens(spec) // kinds.block_span_tokens(spec, ranks) for spec in specs)
    return max(plan.num_blocks - 1 - sinks, 0)


def load_of(plan: Plan, options: PlanOptions, request_tokens: int) -> Load:
    """Returns how many requests of a length fit at once."""
    limits = options.limits(request_tokens)
    blocks = sum(group.spec.max_blocks(limits) for group in plan.groups)
    return Load(request_tokens, blocks, num_request_blocks(plan, options) // max(blocks, 1))


def loads(plan: Plan, options: PlanOptions) -> list[Load]:
    """Returns the loads of short to long requests; empty for a model without a KV cache."""
    if not plan.groups:
        return []
    lengths = [tokens for tokens in _LENGTHS if tokens < plan.max_model_len] + [plan.max_model_len]
    return [load_of(plan, options, tokens) for tokens in lengths]


def hit_multiple_tokens(plan: Plan, options: PlanOptions) -> int:
    """Number of tokens of which every hit of a prefix is a multiple; 0 if no group can be hit."""
    ranks = options.limits(plan.max_model_len).context_parallel_size
    cached = [group.spec for group in plan.groups if kinds.allocation_spec(group.spec).is_cached]
    spans = [span for span in (kinds.block_span_tokens(spec, ranks) for spec in cached) if span < plan.max_model_len]
    return kinds.common_multiple_tokens(spans, plan.max_model_len) if spans else 0
