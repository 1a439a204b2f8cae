"""Calls of one operation, as steps: what sync and asyncio sessions share."""

from collections.abc import Callable
from typing import TypeVar

from kvpool.client.request import Request
from kvpool.client.results import Admission, Allocation, Answer, HitChanged
from kvpool.client.step_builder import StepBuilder
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.steps.columns import Outcome

ResultT = TypeVar("ResultT")

Call = tuple[StepBuilder, Callable[[], ResultT]]
"""A step of one operation, and what makes its result once it has been answered."""


def call_get_computed_blocks(request: Request, *, counted: bool) -> Call[ComputedBlocks]:
    """See `StepBuilder.get_computed_blocks`."""
    builder = StepBuilder()
    answer = builder.get_computed_blocks(request, counted=counted)
    return builder, lambda: answer.computed


def call_admit(
    request: Request, max_new_tokens: int, num_lookahead_tokens: int, num_encoder_tokens: int
) -> Call[Admission | None]:
    """See `StepBuilder.admit`."""
    builder = StepBuilder()
    answer = builder.admit(
        request, max_new_tokens, num_lookahead_tokens=num_lookahead_tokens, num_encoder_tokens=num_encoder_tokens
    )
    return (
        builder,
        lambda: (
            Admission(answer.num_hit_tokens, answer.num_new_tokens, answer.hit_blocks, answer.new_blocks)
            if answer.ok
            else None
        ),
    )


def call_allocate_slots(  # noqa: PLR0913 - the reference's own parameters
    request: Request,
    num_new_tokens: int,
    computed: ComputedBlocks | None,
    num_computed_tokens: int | None,
    num_lookahead_tokens: int,
    *,
    num_encoder_tokens: int,
    delay_cache_blocks: bool,
) -> Call[Allocation | HitChanged | None]:
    """See `StepBuilder.allocate_slots`."""
    builder = StepBuilder()
    answer = builder.allocate_slots(
        request,
        num_new_tokens,
        computed=computed,
        num_computed_tokens=num_computed_tokens,
        num_lookahead_tokens=num_lookahead_tokens,
        num_encoder_tokens=num_encoder_tokens,
        delay_cache_blocks=delay_cache_blocks,
    )

    def read() -> Allocation | HitChanged | None:
        if answer.outcome is Outcome.HIT_CHANGED:
            return HitChanged(answer.computed)
        return Allocation(answer.new_blocks) if answer.ok else None

    return builder, read


def call_simply(fill: Callable[[StepBuilder], Answer]) -> Call[Answer]:
    """One operation, whose answer is told as it is."""
    builder = StepBuilder()
    answer = fill(builder)
    return builder, lambda: answer
