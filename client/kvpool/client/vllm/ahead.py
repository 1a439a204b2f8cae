"""The calls of a round that are foreseen, asked in one message: tokens for running requests, then admissions."""

from collections.abc import Iterator, Sequence

from vllm.v1.request import Request as EngineRequest

from kvpool.client.request import Request
from kvpool.client.results import Answer, Decodes
from kvpool.client.step_builder import StepBuilder
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.server.core.step import Outcome
from kvpool.server.core.terms import USUAL_TERMS, Terms

Asked = Sequence[tuple[EngineRequest, Request]]
"""Requests of the engine, and what the session knows them as."""


class Ahead:
    """What one message asks ahead of the scheduler.

    Attributes:
        num_decodes: Running requests that it asks one token for.
        admissions: Requests that it admits, in order; their answers are filled once it is sent.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._decodes: Decodes | None = None
        self._each: list[Answer] = []
        self.num_decodes = 0
        self.admissions: list[tuple[str, Request, Answer]] = []

    def decode(self, builder: StepBuilder, asked: Asked) -> None:
        """Asks for one token of each, together."""
        self._ids = [request.request_id for request, _ in asked]
        self.num_decodes = len(asked)
        self._decodes = builder.decode([known for _, known in asked])

    def decode_each(self, builder: StepBuilder, asked: Asked) -> None:
        """The same where it matters which tokens are in flight."""
        self._ids = [request.request_id for request, _ in asked]
        self.num_decodes = len(asked)
        for request, known in asked:
            in_flight = getattr(request, "num_in_flight_tokens", 0)
            terms = Terms(num_in_flight_tokens=in_flight) if in_flight else USUAL_TERMS
            self._each.append(builder.allocate_slots(known, 1, terms=terms))

    def admit(self, builder: StepBuilder, asked: Asked, budget_tokens: int, terms: Sequence[Terms]) -> None:
        """Admits requests as long as tokens are left, each on its terms."""
        for (request, known), of_it in zip(asked, terms, strict=True):
            self.admissions.append((request.request_id, known, builder.admit(known, terms=of_it)))
        builder.admission_budget_tokens = budget_tokens

    def decoded(self, nothing: KVCacheBlocks) -> Iterator[tuple[str, KVCacheBlocks | None]]:
        """Once it is sent, or need not be: what each running request got; None if it was refused.

        Those after one that was refused are left out: they were not tried.

        Args:
            nothing: What stands for no new blocks.
        """
        if self._decodes is None:
            for request_id, answer in zip(self._ids, self._each, strict=True):
                if answer.outcome is not Outcome.SKIPPED:
                    new = KVCacheBlocks(answer.new_blocks) if any(answer.new_blocks) else nothing
                    yield request_id, new if answer.ok or answer.outcome is None else None
            return
        refused = self._decodes.refused
        for place, (request_id, ids) in enumerate(zip(self._ids, self._decodes.new_blocks, strict=True)):
            if place not in refused:
                yield request_id, KVCacheBlocks(ids) if any(ids) else nothing
            elif refused[place] is not Outcome.SKIPPED:
                yield request_id, None
