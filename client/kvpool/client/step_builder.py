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
    """An operation that the service is asked for.

    Attributes:
        num_sent_tokens: Tokens of the request that the service knows with the step.
        num_sent_hashes: Hashes of it, likewise.
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
    """Requests that the service is asked to make room for one token each.

    Attributes:
        requests: The requests, which it knows, each named here only so far.
        places: Their places in the batch.
        num_lookahead_tokens: Tokens beyond these to keep room for.
        answer: The batch's.
        num_sent_tokens: Of each, as in `Row`.
        num_sent_hashes: Likewise.
    """

    requests: list[Request]
    places: list[int]
    num_lookahead_tokens: int
    answer: Decodes
    num_sent_tokens: list[int] = field(default_factory=list)
    num_sent_hashes: list[int] = field(default_factory=list)


class StepBuilder:
    """The operations of one step, in the order in which they are asked for.

    An allocation for which a request has quiet room is no operation: the session answers it from its own copy of the
    tables. All answers are filled when the step has been answered. After the first operation that finds too few blocks
    (`Outcome.NO_BLOCKS`), or would pass the session's max_blocks (`Outcome.OVER_QUOTA`), later ones that would take
    blocks are not tried (`Outcome.SKIPPED`). While it is collected, no other call may name its requests.
    """

    def __init__(
        self, admission_budget_tokens: int = 0, executed_sequence: int = 0, launched_sequence: int = 0
    ) -> None:
        """Starts a step.

        Args:
            admission_budget_tokens: Tokens that all admissions together may make room for; 0 for no limit.
            executed_sequence: Newest step whose execution has finished; 0 for no news.
            launched_sequence: Newest step whose execution is sure to come, in order; 0 for no news.
        """
        self.admission_budget_tokens = admission_budget_tokens
        self.executed_sequence = executed_sequence
        self.launched_sequence = launched_sequence
        self.rows: list[Row | DecodeRow] = []
        self.quiet: dict[Request, int] = {}
        """Requests that take room without asking, and how many tokens each."""
        self.filled: Sequence[Request] = ()
        """Of these, those whose decode fills a block: see `DeferredCaching`."""
        self._answers: list[Answer] = []  # of those that do so one by one
        self._decodes: list[Decodes] = []
        self._named: set[Request | None] = set()  # those that are in `rows`

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
        """Looks up, then makes room for as many of the tokens left as the budgets allow, atomically.

        Args:
            request: A request that holds no blocks.
            max_new_tokens: Most tokens to make room for, beyond the hit; 0 for all that are left.
            num_lookahead_tokens: Tokens beyond these to keep room for.
            num_encoder_tokens: Tokens that the encoder puts out, for models with cross attention.
            delay_cache_blocks: Leave full blocks uncached until `cache_blocks`.
            options: On what terms.
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
        """Makes room for more tokens of a request, and caches the blocks that become full.

        Args:
            request: The request.
            num_new_tokens: Tokens to make room for, beyond the computed ones and the hit.
            computed: What a look-up promised, for a request that holds no blocks.
            num_computed_tokens: Computed tokens, if fewer than have room (drafts were rejected).
            num_lookahead_tokens: Tokens beyond the new ones to keep room for (drafts).
            num_encoder_tokens: Tokens that the encoder puts out, for models with cross attention; in the call that
                finds the request without blocks.
            delay_cache_blocks: Leave full blocks uncached until `cache_blocks`.
            options: On what terms.
        """
        rejected = 0 if num_computed_tokens is None else request.num_computed_tokens - num_computed_tokens
        if rejected < 0:
            message = f"{num_computed_tokens}; {request.num_computed_tokens} have room"
            raise InvalidArgumentError("num_computed_tokens", message)
        _check_lookahead(num_lookahead_tokens)
        if request in self.quiet:
            raise InvalidArgumentError("request", f"{request.request_id!r} allocated already in this step")
        is_told_more = rejected or computed or num_encoder_tokens or request in self._named
        # What makes no block fall behind a window does not care which tokens are in flight.
        is_told_more = is_told_more or (
            options is not DEFAULT_OPTIONS and replace(options, num_in_flight_tokens=0) != DEFAULT_OPTIONS
        )
        if not is_told_more and 0 < num_new_tokens <= request.num_credit_tokens - num_lookahead_tokens:
            self.quiet[request] = num_new_tokens
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
        """Makes room for one more token of each request: `allocate_slots` for a whole batch of running requests.

        Most of it costs no operation: see `StepBuilder`.

        Args:
            requests: The requests, each once.
            token_ids: Tokens by which they have grown, one each, which are appended first and stay, even if the step is
                refused; None if that is done.
            num_lookahead_tokens: Tokens beyond these to keep room for (drafts).

        Raises:
            InvalidArgumentError: A request holds no blocks or is named twice in this step; nothing was done.
        """
        _check_lookahead(num_lookahead_tokens)
        wanted = 1 + num_lookahead_tokens
        places = [i for i, request in enumerate(requests) if request.num_credit_tokens < wanted]
        asking = [requests[i] for i in places]
        quiet = dict.fromkeys(requests, 1)
        self._check_running(asking, quiet, len(requests))
        if token_ids is not None:
            if len(token_ids) != len(requests):
                raise InvalidArgumentError("token_ids", f"{len(token_ids)} for {len(requests)} requests")
            for request, token_id in zip(requests, token_ids, strict=True):
                request.token_ids.append(token_id)
        none: list[list[int]] = [[]] * (len(requests[0].block_ids) if requests else 0)
        answer = Decodes([none] * len(requests), asking=places)
        self._decodes.append(answer)
        if asking:
            for request in asking:
                del quiet[request]
            self._named.update(asking)
            self.rows.append(DecodeRow(asking, places, num_lookahead_tokens, answer))
        self.quiet = self.quiet | quiet if self.quiet else quiet
        return answer

    def _check_running(self, asking: Sequence[Request], requests: Mapping[Request, int], count: int) -> None:
        if 0 in [request.num_computed_tokens for request in asking]:
            raise InvalidArgumentError("requests", "one is not running")
        is_named_twice = (
            len(requests) < count
            or (self.quiet and not self.quiet.keys().isdisjoint(requests))
            or (self._named and not self._named.isdisjoint(requests))
        )
        if is_named_twice:
            raise InvalidArgumentError("requests", "one is named twice in this step")

    def can_decode(self, requests: Sequence[Request]) -> bool:
        """Whether nothing in the step forbids a decode of each: they are named by no operation, and run."""
        if 0 in [request.num_computed_tokens for request in requests]:
            return False
        return self.quiet.keys().isdisjoint(requests) and self._named.isdisjoint(requests)

    def fill(self, row: DecodeRow, filling: Sequence[Request]) -> None:
        """Lets decodes of a batch that fill a block take their room without asking."""
        self.filled = filling
        self.quiet.update(dict.fromkeys(filling, 1))
        kept = [(each, place) for each, place in zip(row.requests, row.places, strict=True) if each not in self.quiet]
        row.requests, row.places = [each for each, _ in kept], [place for _, place in kept]
        if not kept:
            self.rows.remove(row)

    def check_credit(self) -> None:
        """Raises InvalidArgumentError if a request that takes room without asking has no such room any more."""
        for request, num_new_tokens in self.quiet.items():
            if request.num_credit_tokens < num_new_tokens:
                message = f"{request.request_id!r} was changed by another call while the step was collected"
                raise InvalidArgumentError("request", message)

    def settle_credit(self) -> None:
        """Gives the requests the room that they take without asking: the step was answered, or need not be sent."""
        for request, num_new_tokens in self.quiet.items():
            request.num_credit_tokens -= num_new_tokens
        for answer in self._answers:
            answer.outcome = Outcome.OK
        for decodes in self._decodes:
            decodes.is_answered = True

    def get_computed_blocks(self, request: Request, *, counted: bool = True) -> Answer:
        """Looks up the longest cached prefix of a request that holds no blocks; its last token is never hit."""
        return self._add(Operation.LOOKUP if counted else Operation.LOOKUP_UNCOUNTED, request)

    def find_computed_blocks(self, request: Request) -> Answer:
        """As `get_computed_blocks`, counted once the request is given room, with the hit that it then gets."""
        return self._add(Operation.LOOKUP_COUNTED_ON_ADMIT, request)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> Answer:
        """Caches the full blocks among the first `num_computed_tokens` tokens (after delay_cache_blocks)."""
        return self._add(Operation.CACHE, request, num_new_tokens=num_computed_tokens)

    def free(self, request: Request) -> Answer:
        """Frees the request's blocks and forgets it. One that the server never heard of is just forgotten."""
        if not request.declared and request not in self._named:
            return Answer(Outcome.OK)
        return self._add(Operation.FREE, request)

    def preempt(self, request: Request) -> Answer:
        """Frees the request's blocks; it keeps its tokens and will be admitted again."""
        return self._add(Operation.PREEMPT, request)

    def evict_blocks(self, block_ids: Sequence[int]) -> Answer:
        """Drops the hashes of blocks."""
        return self._add(Operation.EVICT, None, block_ids=block_ids)

    def reset_prefix_cache(self) -> Answer:
        """Drops all hashes, if no request of any session holds a block."""
        return self._add(Operation.RESET, None)

    def get_common_prefix_blocks(self, request: Request) -> Answer:
        """Counts the leading blocks that all of the session's requests that hold blocks have in common."""
        return self._add(Operation.COMMON_PREFIX, request)

    def _add(self, operation: Operation, request: Request | None, **columns: object) -> Answer:
        answer = Answer()
        self.rows.append(Row(operation, request, answer, **columns))  # type: ignore[arg-type]
        self._named.add(request)
        return answer


def _check_lookahead(num_lookahead_tokens: int) -> None:
    if num_lookahead_tokens < 0:
        raise InvalidArgumentError("num_lookahead_tokens", f"{num_lookahead_tokens} is negative")
