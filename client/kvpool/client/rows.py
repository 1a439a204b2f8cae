"""The operations of a step, as its builder leaves them for the reader of its result."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.client.request import Request
from kvpool.client.results import Answer, Decodes
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.steps.allocation_options import AllocationOptions


@dataclass(slots=True)
class Row:
    """An operation of a step, as the reader of its result needs it.

    Attributes:
        request: The request; None for an operation on the pool.
        answer: Filled with the result.
        num_computed_tokens: Computed tokens of the request before the operation, without rejected ones.
        computed: The hit that the operation allocates.
        options: Options of the allocation.
    """

    request: Request | None
    answer: Answer
    num_computed_tokens: int
    computed: ComputedBlocks | None
    options: AllocationOptions


@dataclass(slots=True)
class DecodeRow:
    """Consecutive decodes of a step: each request gets a slot for one more token.

    Attributes:
        requests: The requests. The service knows them.
        places: Their places in the batch.
        answer: The answer of the whole batch.
        num_lookahead_tokens: Slots to reserve beyond these tokens (drafts).
        run_tokens: See `Request.num_run_tokens`; of each.
    """

    requests: Sequence[Request]
    places: Sequence[int]
    answer: Decodes
    num_lookahead_tokens: int
    run_tokens: Sequence[int]


@dataclass(slots=True)
class ReserveRow:
    """Consecutive operations of a step that report what requests took on credit, and change their reserves.

    Attributes:
        requests: The requests. The service knows them.
        computed_tokens: The computed tokens of each, as the step reports them.
        held_tokens: Number of tokens for which each should hold slots.
        run_tokens: See `DecodeRow`.
        given_back: The reserve of each that the step gives back; empty until it is sent.
    """

    requests: Sequence[Request]
    computed_tokens: Sequence[int]
    held_tokens: Sequence[int]
    run_tokens: Sequence[int]
    given_back: Sequence[list[list[int]]] = ()
