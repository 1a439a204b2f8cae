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
    """

    requests: Sequence[Request]
    places: Sequence[int]
    answer: Decodes
