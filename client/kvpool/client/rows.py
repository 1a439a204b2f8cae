"""The operations of a step, as its builder leaves them for the reader of its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from kvpool.client.request import Request
from kvpool.client.results import Answer, Decodes
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.steps.allocation_options import AllocationOptions
from kvpool.core.steps.columns import Operation, Outcome

_UNSERVED: Final = frozenset((Outcome.NO_BLOCKS, Outcome.OVER_QUOTA, Outcome.SKIPPED))


@dataclass(slots=True)
class Row:
    """An operation of a step, as the reader of its result needs it, and to make it again.

    Attributes:
        operation: The operation.
        request: The request; None for an operation on the pool.
        answer: Filled with the result.
        num_computed_tokens: Computed tokens of the request before the operation, without rejected ones.
        computed: The hit that the operation allocates.
        options: Options of the allocation.
        arguments: These, and the numbers of the operation by the names of their columns.
    """

    operation: Operation
    request: Request | None
    answer: Answer
    num_computed_tokens: int
    computed: ComputedBlocks | None
    options: AllocationOptions
    arguments: Mapping[str, Any]

    @property
    def unserved(self) -> Sequence[tuple[Request, int]]:
        """The request and 0, if it got no blocks because too few were left."""
        return ((self.request, 0),) if self.request and self.answer.outcome in _UNSERVED else ()


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

    @property
    def unserved(self) -> Sequence[tuple[Request, int]]:
        """The requests that got no slot because too few blocks were left, with their places."""
        refused, pairs = self.answer.refused, zip(self.requests, self.places, strict=True)
        return [(request, place) for request, place in pairs if place in refused]


@dataclass(slots=True)
class ReserveRow:
    """Consecutive operations of a step that report what requests took on credit, and change their reserves.

    Attributes:
        requests: The requests. The service knows them.
        computed_tokens: The computed tokens of each, as the step reports them.
        held_tokens: Number of tokens for which each should hold slots.
        run_tokens: See `DecodeRow`.
    """

    requests: Sequence[Request]
    computed_tokens: Sequence[int]
    held_tokens: Sequence[int]
    run_tokens: Sequence[int]
    unserved: ClassVar = ()
