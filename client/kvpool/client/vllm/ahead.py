"""The calls of a round that are foreseen, asked in one message: tokens for running requests, then admissions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm.v1.request import Request as EngineRequest

from kvpool.client.request import Request
from kvpool.client.results import Answer, Decodes
from kvpool.client.step_builder import StepBuilder
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.server.core.step import Outcome
from kvpool.server.core.terms import USUAL_TERMS, Terms

Asked = Sequence[tuple[EngineRequest, Request]]
"""Requests of the engine, and what the session knows them as."""

Given = tuple[KVCacheBlocks | None, int]
"""What a running request got, None if it was refused; and for how many tokens."""


class _One(NamedTuple):
    """One running request, and for how many tokens it asks."""

    request_id: str
    answer: Answer
    num_tokens: int


class _Together(NamedTuple):
    """Many that ask for a token each."""

    request_ids: list[str]
    decodes: Decodes


class Ahead:
    """What one message asks ahead of the scheduler.

    Attributes:
        num_lookahead_tokens: Tokens beyond those of each running request to keep room for.
        num_tokens: Tokens that it asks for running requests.
        admissions: Requests that it admits, in order; their answers are filled once it is sent.
    """

    def __init__(self, num_lookahead_tokens: int) -> None:
        self.num_lookahead_tokens = num_lookahead_tokens
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
            self._asked.append(_Together(list(asked), decodes))
            self.num_tokens += len(asked)

    def allocate(self, builder: StepBuilder, request: EngineRequest, known: Request, num_tokens: int) -> None:
        """Asks for tokens of one: several, or after drafts thrown away, or where it matters which are in flight."""
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        terms = Terms(num_in_flight_tokens=in_flight) if in_flight else USUAL_TERMS
        answer = builder.allocate_slots(
            known,
            num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_lookahead_tokens=self.num_lookahead_tokens,
            terms=terms,
        )
        self._asked.append(_One(request.request_id, answer, num_tokens))
        self.num_tokens += num_tokens

    def admit(
        self, builder: StepBuilder, asked: Asked, budget_tokens: int, most_tokens: int, terms: Sequence[Terms]
    ) -> None:
        """Admits requests as long as tokens are left, each with `most_tokens` at most (0: all), and on its terms."""
        for (request, known), of_it in zip(asked, terms, strict=True):
            self.admissions.append((request.request_id, known, builder.admit(known, most_tokens, terms=of_it)))
        builder.admission_budget_tokens = budget_tokens

    def given(self, nothing: KVCacheBlocks) -> dict[str, Given]:
        """Once it is sent, or need not be: what each running request got.

        Those after one that was refused are left out: they were not tried.

        Args:
            nothing: What stands for no new blocks.
        """
        given: dict[str, Given] = {}
        for part in self._asked:
            if isinstance(part, _Together):
                given.update(_given_together(part, nothing))
                continue
            request_id, answer, num_tokens = part
            if answer.outcome is not Outcome.SKIPPED:
                new = KVCacheBlocks(answer.new_blocks) if any(answer.new_blocks) else nothing
                given[request_id] = (new if answer.ok or answer.outcome is None else None, num_tokens)
        return given


def _given_together(part: _Together, nothing: KVCacheBlocks) -> dict[str, Given]:
    ids, decodes = part
    given: dict[str, Given] = dict.fromkeys(ids, (nothing, 1))
    for place in decodes.served:
        given[ids[place]] = (KVCacheBlocks(decodes.new_blocks[place]), 1)
    for place, outcome in decodes.refused.items():
        if outcome is Outcome.SKIPPED:
            del given[ids[place]]
        else:
            given[ids[place]] = (None, 1)
    return given
