"""The calls of a round that are foreseen, asked in one message: tokens for running requests, then admissions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm.v1.request import Request as EngineRequest

from kvpool.client.request import Request
from kvpool.client.results import Answer, Decodes
from kvpool.client.step_builder import StepBuilder
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions
from kvpool.core.steps.columns import Outcome

Asked = Sequence[tuple[EngineRequest, Request]]
"""Requests of the engine, and what the session knows them as."""

Given = tuple[KVCacheBlocks | None, int]
"""What a running request got, None if it was refused; and for how many tokens."""


class _One(NamedTuple):
    """One running request, for how many tokens it asks, and what it is given."""

    request_id: str
    answer: Answer
    num_tokens: int
    blocks: KVCacheBlocks


class _Together(NamedTuple):
    """Many that ask for a token each; and, by their places, what those are given that may need a block."""

    request_ids: list[str]
    decodes: Decodes
    blocks: dict[int, KVCacheBlocks]


class BatchedRequests:
    """What one message asks ahead of the scheduler.

    What a request is given is there before the answer, so that the scheduler can go on with it; its blocks come later.

    Attributes:
        num_lookahead_tokens: Tokens beyond those of each running request to keep room for.
        num_tokens: Tokens that it asks for running requests.
        admissions: Requests that it admits, in order; their answers are filled once it is sent.
    """

    def __init__(self, num_lookahead_tokens: int, nothing: KVCacheBlocks) -> None:
        """Starts one; `nothing` stands for no new blocks."""
        self.num_lookahead_tokens = num_lookahead_tokens
        self._nothing = nothing
        self._asked: list[_One | _Together] = []
        self.num_tokens = 0
        self.admissions: list[tuple[str, Request, Answer]] = []

    @property
    def is_empty(self) -> bool:
        """Whether it asks nothing."""
        return not (self._asked or self.admissions)

    def decode(self, builder: StepBuilder, asked: Mapping[str, Request]) -> None:
        """Asks for one token of each, by ids, together."""
        if asked:
            decodes = builder.decode(list(asked.values()), num_lookahead_tokens=self.num_lookahead_tokens)
            blocks = {place: KVCacheBlocks.promised() for place in decodes.asking}
            self._asked.append(_Together(list(asked), decodes, blocks))
            self.num_tokens += len(asked)

    def allocate(self, builder: StepBuilder, request: EngineRequest, known: Request, num_tokens: int) -> None:
        """Asks for tokens of one: several, or after drafts thrown away, or where it matters which are in flight."""
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        options = AllocationOptions(num_in_flight_tokens=in_flight) if in_flight else DEFAULT_OPTIONS
        answer = builder.allocate_slots(
            known,
            num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_lookahead_tokens=self.num_lookahead_tokens,
            options=options,
        )
        self._asked.append(_One(request.request_id, answer, num_tokens, KVCacheBlocks.promised()))
        self.num_tokens += num_tokens

    def admit(
        self,
        builder: StepBuilder,
        asked: Asked,
        budget_tokens: int,
        most_tokens: int,
        options: Sequence[AllocationOptions],
    ) -> None:
        """Admits requests as long as tokens are left, each with `most_tokens` at most (0: all), and on its terms."""
        for (request, known), of_it in zip(asked, options, strict=True):
            self.admissions.append((request.request_id, known, builder.admit(known, most_tokens, options=of_it)))
        builder.admission_budget_tokens = budget_tokens

    def promised(self) -> dict[str, Given]:
        """What each running request gets if none is refused; `fill` sets the ids of new blocks."""
        promised: dict[str, Given] = {}
        for part in self._asked:
            if isinstance(part, _One):
                promised[part.request_id] = (part.blocks, part.num_tokens)
                continue
            promised.update(dict.fromkeys(part.request_ids, (self._nothing, 1)))
            for place, blocks in part.blocks.items():
                promised[part.request_ids[place]] = (blocks, 1)
        return promised

    def fill(self) -> dict[str, Outcome]:
        """Sets the ids, once it is answered or need not be sent; returns whom it refused, and why."""
        refused: dict[str, Outcome] = {}
        for part in self._asked:
            if isinstance(part, _One):
                outcome = part.answer.outcome
                if outcome:  # neither OK, nor not sent
                    refused[part.request_id] = outcome
                part.blocks.block_ids = part.answer.new_blocks or self._nothing.block_ids
                continue
            for place, blocks in part.blocks.items():
                blocks.block_ids = part.decodes.new_blocks[place]
            for place, outcome in part.decodes.refused.items():
                refused[part.request_ids[place]] = outcome
        return refused
