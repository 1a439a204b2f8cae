"""The predicted calls of a round in one message: tokens for running requests, then admissions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm.v1.request import Request as EngineRequest

from kvpool.client.request import Request
from kvpool.client.results import Answer, Decodes
from kvpool.client.step_builder import StepBuilder
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions
from kvpool.core.steps.columns import Outcome

RequestPairs = Sequence[tuple[EngineRequest, Request]]
"""Requests of the engine with the requests of the session."""

Grant = tuple[KVCacheBlocks | None, int]
"""New blocks of a running request, None if it was refused, and the number of tokens."""


class _SingleRequest(NamedTuple):
    """An allocation of one running request, and its new blocks."""

    request_id: str
    answer: Answer
    num_tokens: int
    blocks: KVCacheBlocks


class _DecodeBatch(NamedTuple):
    """Running requests that allocate one token each, and the new blocks of those that may need one, by index."""

    request_ids: list[str]
    decodes: Decodes
    blocks: dict[int, KVCacheBlocks]


class BatchedRequests:
    """The predicted calls of one message.

    Grants exist before the answer, so that the scheduler can continue with them; their block ids are set later.

    Attributes:
        num_lookahead_tokens: Extra tokens per running request to allocate slots for.
        num_tokens: Tokens of all running requests in the message.
        admissions: Admitted requests, in order; their answers are set when the message is answered.
    """

    def __init__(self, num_lookahead_tokens: int, no_blocks: KVCacheBlocks) -> None:
        """Starts an empty batch; `no_blocks` represents no new blocks."""
        self.num_lookahead_tokens = num_lookahead_tokens
        self._no_blocks = no_blocks
        self._parts: list[_SingleRequest | _DecodeBatch] = []
        self.num_tokens = 0
        self.admissions: list[tuple[str, Request, Answer]] = []

    @property
    def is_empty(self) -> bool:
        """Whether the batch has no calls."""
        return not (self._parts or self.admissions)

    def decode(self, builder: StepBuilder, requests: Mapping[str, Request]) -> None:
        """Adds one token for each request, by id, in one row group."""
        if requests:
            decodes = builder.decode(list(requests.values()), num_lookahead_tokens=self.num_lookahead_tokens)
            blocks = {place: KVCacheBlocks.pending() for place in decodes.asking}
            self._parts.append(_DecodeBatch(list(requests), decodes, blocks))
            self.num_tokens += len(requests)

    def allocate(self, builder: StepBuilder, request: EngineRequest, session_request: Request, num_tokens: int) -> None:
        """Adds tokens of one request: several tokens, rejected drafts, or a model where tokens in flight matter."""
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        options = AllocationOptions(num_in_flight_tokens=in_flight) if in_flight else DEFAULT_OPTIONS
        answer = builder.allocate_slots(
            session_request,
            num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_lookahead_tokens=self.num_lookahead_tokens,
            options=options,
        )
        self._parts.append(_SingleRequest(request.request_id, answer, num_tokens, KVCacheBlocks.pending()))
        self.num_tokens += num_tokens

    def admit(
        self,
        builder: StepBuilder,
        pairs: RequestPairs,
        budget_tokens: int,
        max_tokens: int,
        options: Sequence[AllocationOptions],
    ) -> None:
        """Adds admissions while tokens are left, each with at most `max_tokens` tokens (0: all) and its own options."""
        for (request, session_request), request_options in zip(pairs, options, strict=True):
            answer = builder.admit(session_request, max_tokens, options=request_options)
            self.admissions.append((request.request_id, session_request, answer))
        builder.admission_budget_tokens = budget_tokens

    def grants(self) -> dict[str, Grant]:
        """The grant of each running request if none is refused; `resolve` sets the ids of new blocks."""
        grants: dict[str, Grant] = {}
        for part in self._parts:
            if isinstance(part, _SingleRequest):
                grants[part.request_id] = (part.blocks, part.num_tokens)
                continue
            grants.update(dict.fromkeys(part.request_ids, (self._no_blocks, 1)))
            for place, blocks in part.blocks.items():
                grants[part.request_ids[place]] = (blocks, 1)
        return grants

    def resolve(self) -> dict[str, Outcome]:
        """Sets the block ids after the answer, or if no message is needed; returns refusals by request id."""
        refused: dict[str, Outcome] = {}
        for part in self._parts:
            if isinstance(part, _SingleRequest):
                outcome = part.answer.outcome
                if outcome:  # neither OK, nor not sent
                    refused[part.request_id] = outcome
                part.blocks.block_ids = part.answer.new_blocks or self._no_blocks.block_ids
                continue
            for place, blocks in part.blocks.items():
                blocks.block_ids = part.decodes.new_blocks[place]
            for place, outcome in part.decodes.refused.items():
                refused[part.request_ids[place]] = outcome
        return refused
