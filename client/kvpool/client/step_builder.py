"""Collects the operations of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvpool.client.request import Request
from kvpool.client.results import Answer, Decodes
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions
from kvpool.core.steps.columns import Operation, Outcome


@dataclass(slots=True)
class Row:
    """An operation of a step that is sent to the service.

    Attributes:
        num_sent_tokens: Tokens of the request that the service knows after the step.
        num_sent_hashes: Hashes of the request that the service knows after the step.
    """

    operation: Operation
    request: Request | None
    answer: Answer
    num_new_tokens: int = 0
    num_rejected_tokens: int = 0
    num_lookahead_tokens: int = 0
    num_encoder_tokens: int = 0
    delay_cache_blocks: bool = False
    options: AllocationOptions = DEFAULT_OPTIONS
    computed: ComputedBlocks | None = None
    block_ids: Sequence[int] = ()
    num_sent_tokens: int = 0
    num_sent_hashes: int = 0


@dataclass(slots=True)
class DecodeRow:
    """Decodes of a step that are sent to the service: each request needs a slot for one more token.

    Attributes:
        requests: The requests. The service knows them, and no earlier row names them.
        places: Their places in the batch.
        num_lookahead_tokens: Slots to reserve beyond these tokens.
        answer: The answer of the whole batch.
        num_sent_tokens: See `Row`; one per request.
        num_sent_hashes: See `Row`; one per request.
    """

    requests: list[Request]
    places: list[int]
    num_lookahead_tokens: int
    answer: Decodes
    num_sent_tokens: list[int] = field(default_factory=list)
    num_sent_hashes: list[int] = field(default_factory=list)


class StepBuilder:
    """The operations of one step, in order.

    An allocation within a request's credit is not sent: the session answers it from its own copy of the block tables.
    All answers are filled when the step has been answered. After the first operation that finds too few blocks
    (`Outcome.NO_BLOCKS`), or would exceed the session's max_blocks (`Outcome.OVER_QUOTA`), later operations that need
    blocks are skipped (`Outcome.SKIPPED`). While a step is collected, no other call may name its requests.

    Attributes:
        rows: The operations to send.
        on_credit: Requests that allocate on credit, and how many tokens each.
        filled: The requests of these whose decode fills a block: see `DeferredCaching`.
    """

    def __init__(
        self, admission_budget_tokens: int = 0, executed_sequence: int = 0, launched_sequence: int = 0
    ) -> None:
        """Starts a step.

        Args:
            admission_budget_tokens: Maximum number of tokens that all admissions together allocate; 0 for no limit.
            executed_sequence: Newest step whose execution has finished; 0 for no report.
            launched_sequence: Newest step whose execution is certain, in order; 0 for no report.
        """
        self.admission_budget_tokens = admission_budget_tokens
        self.executed_sequence = executed_sequence
        self.launched_sequence = launched_sequence
        self.rows: list[Row | DecodeRow] = []
        self.on_credit: dict[Request, int] = {}
        self.filled: Sequence[Request] = ()
        self._answers: list[Answer] = []
        """Answers of single allocations on credit."""
        self._decodes: list[Decodes] = []
        self._named: set[Request | None] = set()
        """Requests of `rows`."""

    def admit(  # noqa: PLR0913 - the reference's own parameters
        self,
        request: Request,
        max_new_tokens: int = 0,
        *,
        num_lookahead_tokens: int = 0,
        num_encoder_tokens: int = 0,
        delay_cache_blocks: bool = False,
        options: AllocationOptions = DEFAULT_OPTIONS,
    ) -> Answer:
        """Looks up the cached prefix of a request, and allocates slots for more of its tokens, atomically.

        In a step it allocates as many of the remaining tokens as the budgets allow. On a session it returns an
        `Admission`, or None if there are too few blocks or the session would exceed its max_blocks.

        Args:
            request: A request that holds no blocks.
            max_new_tokens: Maximum number of tokens to allocate beyond the hit; 0 for all that remain.
            num_lookahead_tokens: Slots to reserve beyond these tokens.
            num_encoder_tokens: Number of encoder output tokens, for models with cross attention.
            delay_cache_blocks: Leave full blocks uncached until `cache_blocks`.
            options: Options of the allocation.
        """
        return self._add(
            Operation.ADMIT,
            request,
            num_new_tokens=max_new_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            num_encoder_tokens=num_encoder_tokens,
            delay_cache_blocks=delay_cache_blocks,
            options=options,
        )

    def allocate_slots(  # noqa: PLR0913 - the reference's own parameters
        self,
        request: Request,
        num_new_tokens: int,
        *,
        computed: ComputedBlocks | None = None,
        num_computed_tokens: int | None = None,
        num_lookahead_tokens: int = 0,
        num_encoder_tokens: int = 0,
        delay_cache_blocks: bool = False,
        options: AllocationOptions = DEFAULT_OPTIONS,
    ) -> Answer:
        """Allocates slots for more tokens of a request, and caches the blocks that become full.

        On a session it returns one of three. An `Allocation` holds the new blocks. None means that there are too few
        blocks, or the session would exceed its max_blocks: preempt a request and try again (in a step, the outcome
        distinguishes the two). `HitChanged` means that a block of the look-up has been evicted meanwhile: allocate
        again with its hit. In the last two cases nothing was allocated.

        Args:
            request: The request.
            num_new_tokens: Tokens to allocate slots for, beyond the computed tokens and the hit.
            computed: The result of a look-up, for a request that holds no blocks.
            num_computed_tokens: Number of computed tokens, if fewer than have slots (drafts were rejected).
            num_lookahead_tokens: Slots to reserve beyond the new tokens (drafts).
            num_encoder_tokens: Number of encoder output tokens, for models with cross attention; in the call in which
                the request holds no blocks yet.
            delay_cache_blocks: Leave full blocks uncached until `cache_blocks`.
            options: Options of the allocation.
        """
        rejected = 0 if num_computed_tokens is None else request.num_computed_tokens - num_computed_tokens
        if rejected < 0:
            message = f"{num_computed_tokens}; {request.num_computed_tokens} have slots"
            raise InvalidArgumentError("num_computed_tokens", message)
        _check_lookahead(num_lookahead_tokens)
        if request in self.on_credit:
            raise InvalidArgumentError("request", f"{request.request_id!r} allocated already in this step")
        must_send = rejected or computed or num_encoder_tokens or request in self._named
        # On credit no block slides out of a window, so that the number of tokens in flight makes no difference.
        must_send = must_send or (
            options is not DEFAULT_OPTIONS and replace(options, num_in_flight_tokens=0) != DEFAULT_OPTIONS
        )
        if not must_send and 0 < num_new_tokens <= request.num_credit_tokens - num_lookahead_tokens:
            self.on_credit[request] = num_new_tokens
            answer = Answer(new_blocks=[[] for _ in request.block_ids])
            self._answers.append(answer)
            return answer
        return self._add(
            Operation.ALLOCATE,
            request,
            num_new_tokens=num_new_tokens,
            num_rejected_tokens=rejected,
            num_lookahead_tokens=num_lookahead_tokens,
            num_encoder_tokens=num_encoder_tokens,
            delay_cache_blocks=delay_cache_blocks,
            options=options,
            computed=computed,
        )

    def decode(
        self, requests: Sequence[Request], token_ids: Sequence[int] | None = None, *, num_lookahead_tokens: int = 0
    ) -> Decodes:
        """Allocates a slot for one more token of each request: `allocate_slots` for a batch of running requests.

        Most decodes are answered on credit: see `StepBuilder`.

        Args:
            requests: The requests, each once.
            token_ids: The newest token of each request. They are appended first, and stay if the step is refused. None
                if they have been appended already.
            num_lookahead_tokens: Slots to reserve beyond these tokens (drafts).

        Raises:
            InvalidArgumentError: A request holds no blocks or is named twice in this step; nothing was done.
        """
        _check_lookahead(num_lookahead_tokens)
        wanted = 1 + num_lookahead_tokens
        places = [i for i, request in enumerate(requests) if request.num_credit_tokens < wanted]
        sent = [requests[i] for i in places]
        on_credit = dict.fromkeys(requests, 1)
        self._check_running(sent, on_credit, len(requests))
        if token_ids is not None:
            if len(token_ids) != len(requests):
                raise InvalidArgumentError("token_ids", f"{len(token_ids)} for {len(requests)} requests")
            for request, token_id in zip(requests, token_ids, strict=True):
                request.token_ids.append(token_id)
        none: list[list[int]] = [[]] * (len(requests[0].block_ids) if requests else 0)
        answer = Decodes([none] * len(requests), may_need_blocks=places)
        self._decodes.append(answer)
        if sent:
            for request in sent:
                del on_credit[request]
            self._named.update(sent)
            self.rows.append(DecodeRow(sent, places, num_lookahead_tokens, answer))
        self.on_credit = self.on_credit | on_credit if self.on_credit else on_credit
        return answer

    def _check_running(self, sent: Sequence[Request], requests: Mapping[Request, int], count: int) -> None:
        if 0 in [request.num_computed_tokens for request in sent]:
            raise InvalidArgumentError("requests", "one is not running")
        is_named_twice = (
            len(requests) < count
            or (self.on_credit and not self.on_credit.keys().isdisjoint(requests))
            or (self._named and not self._named.isdisjoint(requests))
        )
        if is_named_twice:
            raise InvalidArgumentError("requests", "one is named twice in this step")

    def can_decode(self, requests: Sequence[Request]) -> bool:
        """Whether `decode` would accept the requests: all are running, and none is named in this step."""
        if 0 in [request.num_computed_tokens for request in requests]:
            return False
        return self.on_credit.keys().isdisjoint(requests) and self._named.isdisjoint(requests)

    def move_to_credit(self, row: DecodeRow, filling: Sequence[Request]) -> None:
        """Moves decodes of a batch that only fill a block to credit."""
        self.filled = filling
        self.on_credit.update(dict.fromkeys(filling, 1))
        kept = [
            (each, place) for each, place in zip(row.requests, row.places, strict=True) if each not in self.on_credit
        ]
        row.requests, row.places = [each for each, _ in kept], [place for _, place in kept]
        if not kept:
            self.rows.remove(row)

    def check_credit(self) -> None:
        """Raises InvalidArgumentError if a request that allocates on credit has no credit left."""
        for request, num_new_tokens in self.on_credit.items():
            if request.num_credit_tokens < num_new_tokens:
                message = f"{request.request_id!r} was changed by another call while the step was collected"
                raise InvalidArgumentError("request", message)

    def take_credit(self) -> None:
        """Applies the allocations on credit: the step was answered, or need not be sent."""
        for request, num_new_tokens in self.on_credit.items():
            request.num_credit_tokens -= num_new_tokens
        for answer in self._answers:
            answer.outcome = Outcome.OK
        for decodes in self._decodes:
            decodes.is_answered = True

    def get_computed_blocks(self, request: Request, *, counted: bool = True) -> Answer:
        """Looks up the longest cached prefix of a request that holds no blocks; its last token is never hit.

        The blocks are not held: some may be evicted before `allocate_slots`.
        """
        return self._add(Operation.LOOKUP if counted else Operation.LOOKUP_UNCOUNTED, request)

    def find_computed_blocks(self, request: Request) -> Answer:
        """As `get_computed_blocks`, but counted when slots are allocated, with the hit that the request then gets."""
        return self._add(Operation.LOOKUP_COUNTED_ON_ADMIT, request)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> Answer:
        """Caches the full blocks among the first `num_computed_tokens` tokens (after delay_cache_blocks)."""
        return self._add(Operation.CACHE, request, num_new_tokens=num_computed_tokens)

    def free(self, request: Request) -> Answer:
        """Frees the request's blocks, the last first, and forgets the request.

        Its cached blocks stay hidden from other sessions, unless they were reported as executed (`mark_executed`): the
        step that fills them may never run. A request that the server does not know is not sent.
        """
        if not request.declared and request not in self._named:
            return Answer(Outcome.OK)
        return self._add(Operation.FREE, request)

    def preempt(self, request: Request) -> Answer:
        """Frees the request's blocks, as `free` does. The request keeps its tokens and can be admitted again."""
        return self._add(Operation.PREEMPT, request)

    def evict_blocks(self, block_ids: Sequence[int]) -> Answer:
        """Removes the hashes of blocks, so that they are no longer found."""
        return self._add(Operation.EVICT, None, block_ids=block_ids)

    def reset_prefix_cache(self) -> Answer:
        """Removes all hashes, unless a request of any session holds a block.

        If one does, the outcome is `Outcome.IN_USE`, and the method of a session returns False.
        """
        return self._add(Operation.RESET, None)

    def get_common_prefix_blocks(self, request: Request) -> Answer:
        """Counts, per group, the leading blocks that all requests of this session that hold blocks have in common."""
        return self._add(Operation.COMMON_PREFIX, request)

    def _add(self, operation: Operation, request: Request | None, **columns: object) -> Answer:
        answer = Answer()
        self.rows.append(Row(operation, request, answer, **columns))  # type: ignore[arg-type]
        self._named.add(request)
        return answer


def _check_lookahead(num_lookahead_tokens: int) -> None:
    if num_lookahead_tokens < 0:
        raise InvalidArgumentError("num_lookahead_tokens", f"{num_lookahead_tokens} is negative")
