"""The predicted calls of a round in one message: tokens for running requests, then admissions."""

from collections.abc import Sequence

from vllm.v1.request import Request as EngineRequest

from kvpool.client.request import Request
from kvpool.client.results import Answer, Decodes
from kvpool.client.step_builder import StepBuilder
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions
from kvpool.core.steps.columns import Outcome

Grant = tuple[KVCacheBlocks | None, int]
"""New blocks of a running request, None if it was refused, and the number of tokens."""


class BatchedRequests:
    """The predicted calls of one message.

    Grants exist before the answer, so that the scheduler can continue with them; their block ids are set later.

    Attributes:
        num_tokens: Tokens of the running requests in the message; after `resolve`, only of those that were not refused.
        grants: The grants of running requests, as if none is refused until `resolve` corrects them.
        admissions: Ids of admitted requests, in order, with their answers, which are set when the message is answered.
    """

    def __init__(self, num_lookahead_tokens: int, no_blocks: KVCacheBlocks, *, windowed: bool) -> None:
        """Starts an empty batch.

        Args:
            num_lookahead_tokens: Extra tokens per running request to allocate slots for.
            no_blocks: Represents no new blocks.
            windowed: Whether allocations depend on the tokens in flight.
        """
        self._num_lookahead_tokens = num_lookahead_tokens
        self._no_blocks = no_blocks
        self._windowed = windowed
        self._new_blocks: list[tuple[str, KVCacheBlocks, Answer | Decodes, int]] = []
        """By request: its new blocks, the answer that will have their ids, and its place in that of decodes."""
        self.num_tokens = 0
        self.grants: dict[str, Grant] = {}
        self.admissions: list[tuple[str, Answer]] = []

    @property
    def is_empty(self) -> bool:
        """Whether the batch has no calls."""
        return not (self.grants or self.admissions)

    def add_running(
        self,
        builder: StepBuilder,
        predicted: Sequence[tuple[EngineRequest, int]],
        found: Sequence[Request],
        *,
        batches: bool,
    ) -> None:
        """Adds tokens of running requests, given with the session's requests; decodes together if `batches`."""
        decodes: list[tuple[EngineRequest, Request]] = []
        for (request, num_tokens), session_request in zip(predicted, found, strict=False):
            is_decode = num_tokens == 1 and session_request.num_computed_tokens == request.num_computed_tokens
            if is_decode and batches:
                decodes.append((request, session_request))
            else:
                self._decode(builder, decodes)
                decodes = []
                self._allocate(builder, request, session_request, num_tokens)
        self._decode(builder, decodes)

    def _decode(self, builder: StepBuilder, decodes: Sequence[tuple[EngineRequest, Request]]) -> None:
        """Adds one token for each request, in one row group."""
        if not decodes:
            return
        in_flight = [request.num_in_flight_tokens for request, _ in decodes] if self._windowed else ()
        requests = [session_request for _, session_request in decodes]
        ahead = self._num_lookahead_tokens
        answer = builder.decode(requests, num_lookahead_tokens=ahead, num_in_flight_tokens=in_flight)
        self.grants.update(dict.fromkeys([request.request_id for request in requests], (self._no_blocks, 1)))
        for place in answer.may_need_blocks:
            self._add(requests[place].request_id, 1, answer, place)
        self.num_tokens += len(requests)

    def _allocate(
        self, builder: StepBuilder, request: EngineRequest, session_request: Request, num_tokens: int
    ) -> None:
        """Adds tokens of one request: several tokens, rejected drafts, or a model where tokens in flight matter."""
        in_flight = request.num_in_flight_tokens
        options = AllocationOptions(num_in_flight_tokens=in_flight) if in_flight else DEFAULT_OPTIONS
        answer = builder.allocate_slots(
            session_request,
            num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_lookahead_tokens=self._num_lookahead_tokens,
            options=options,
        )
        self._add(request.request_id, num_tokens, answer)
        self.num_tokens += num_tokens

    def _add(self, request_id: str, num_tokens: int, answer: Answer | Decodes, place: int = 0) -> None:
        blocks = KVCacheBlocks.pending()
        self.grants[request_id] = (blocks, num_tokens)
        self._new_blocks.append((request_id, blocks, answer, place))

    def resolve(self) -> dict[str, Outcome]:
        """Completes the grants after the answer, or if no message is needed; returns the refused requests, by id."""
        refused: dict[str, Outcome] = {}
        for request_id, blocks, answer, place in self._new_blocks:
            if isinstance(answer, Decodes):
                blocks.block_ids, outcome = answer.new_blocks[place], answer.refused.get(place)
            elif answer.outcome is None:  # not sent yet: all calls are on credit, without blocks
                blocks.block_ids, outcome = self._no_blocks.block_ids, None
            else:
                blocks.block_ids, outcome = answer.new_blocks or self._no_blocks.block_ids, answer.outcome
            if outcome:
                refused[request_id] = outcome
                _, num_tokens = self.grants.pop(request_id)
                self.num_tokens -= num_tokens
                if outcome is not Outcome.SKIPPED:  # else the service did not try it
                    self.grants[request_id] = (None, num_tokens)
        return refused
