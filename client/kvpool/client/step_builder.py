"""Collects the operations of a step, in the columns that are sent."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvpool.client.request import Request, checked_token_ids, hash_filled_blocks
from kvpool.client.reserves import REPORT_STEPS, Spans, due, note_run_tokens, restore_held, set_held, take_slots
from kvpool.client.results import Answer, Decodes
from kvpool.client.rows import DecodeRow, ReserveRow, Row
from kvpool.client.trace_context import NO_TRACE_CONTEXT, packed_trace_context
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.errors import InvalidArgumentError, NotFoundError, WrongStateError
from kvpool.core.ids import MAX_TOKENS, GroupId
from kvpool.core.specs.kinds import CrossAttentionSpec, allocation_spec, has_gaps, num_draft_blocks
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, OPTION_COLUMNS, AllocationOptions
from kvpool.core.steps.columns import DECLARING, LEAVING, Operation, Outcome, Step

_OFTEN_EMPTY: Final = (
    "declares",
    "num_prompt_tokens",
    "num_taken_tokens",
    "num_rejected_tokens",
    "num_lookahead_tokens",
    "num_encoder_tokens",
    "delay_cache_blocks",
    *OPTION_COLUMNS,
)
"""Columns that are empty, or end early, until the step is complete."""
_UNAWAITED: Final = frozenset((*LEAVING, Operation.EVICT))
"""Operations whose answers tell a scheduler nothing that it needs."""


@dataclass(frozen=True, slots=True)
class StepFormat:
    """What a pool's configuration decides about the columns of a step.

    Attributes:
        num_groups: Number of groups.
        hash_block_size: Tokens per hash; 0 without caching.
        sends_tokens: Whether the step contains the appended tokens, for events.
        num_lookahead_tokens: Number of tokens after its block that a hash covers.
        max_tokens: Maximum length of a request.
        spans: See `reserves`.
        has_windows: Whether a group frees blocks that its tokens leave behind.
        has_gaps: Whether a group keeps only the states at the ends of steps.
        report_tokens: Number of computed tokens that the service should know of, see `due`.
    """

    num_groups: int
    hash_block_size: int
    sends_tokens: bool
    num_lookahead_tokens: int = 0
    max_tokens: int = MAX_TOKENS
    spans: Spans = ()
    has_windows: bool = False
    has_gaps: bool = False
    report_tokens: int = 0

    @classmethod
    def of(cls, config: PoolConfig) -> "StepFormat":
        """Returns the format for a pool."""
        hash_block_size = config.hash_block_size if config.enable_caching else 0
        specs = [allocation_spec(group.spec) for group in config.groups]
        spans = tuple(
            (i, config.span_tokens(GroupId(i)), num_draft_blocks(spec))
            for i, spec in enumerate(specs)
            if not isinstance(spec, CrossAttentionSpec)
        )
        num_ahead = config.hash_scheme.num_lookahead_tokens
        has_windows = not all(spec.keeps_all for spec in specs)
        report_tokens = hash_block_size or (spans[0][1] if has_windows else 0)
        sends, most = config.makes_events, config.max_model_len
        gaps = any(has_gaps(spec) for spec in specs)
        return cls(len(specs), hash_block_size, sends, num_ahead, most, spans, has_windows, gaps, report_tokens)


class StepBuilder:
    """The operations of one step, in order. Make it with a method of a session.

    An allocation within a request's credit is not sent: the session answers it itself. All answers are filled when the
    step has been answered. After the first operation that finds too few blocks (`Outcome.NO_BLOCKS`), or would exceed
    the session's max_blocks (`Outcome.OVER_QUOTA`), later operations that need blocks are skipped (`Outcome.SKIPPED`).
    The outcome of a request that needs more blocks than the session can ever hold is `Outcome.NEVER_FITS`: free it.
    A step names a request at most once. While it is collected, its session must not make another step.

    Attributes:
        step: The operations to send. A request that is new to the service is declared by its operation.
        rows: The same operations, for the reader of the result.
        on_credit: Requests that allocate on credit, each with its number of tokens, and of slots for these and drafts.
        round_number: See `SessionProtocol.new_step`.
        is_sent: Whether the step was sent, so that it takes no more operations.
        waits: Whether a scheduler needs the answer of an operation before it continues.
    """

    def __init__(self, step_format: StepFormat, round_number: int, step: Step) -> None:
        self.step = step
        self.rows: list[Row | DecodeRow | ReserveRow] = []
        self.on_credit: dict[Request, tuple[int, int]] = {}
        self.round_number = round_number
        self.is_sent = False
        self.waits = False
        self._is_taken = False
        """Whether the allocations on credit were applied."""
        self._format = step_format
        self._answers: list[tuple[Answer, Request]] = []
        """Answers of single allocations on credit, with their requests."""
        self._decodes: list[tuple[Decodes, Sequence[Request]]] = []
        """Batches of decodes, with their requests."""
        self._named: set[Request] = set()
        """Requests of `rows`."""
        self._hashes: list[bytes] = []
        self._trace_contexts: list[bytes] = []

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
        `Admission`, or None if there are too few blocks or the session would exceed its max_blocks, and raises
        ExhaustedError (REQUEST_NEVER_FITS) if the session can never hold enough blocks.

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
        again with its hit. In the last two cases nothing was allocated. As `admit`, it raises ExhaustedError for a
        request that never fits.

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

        Raises:
            NotFoundError: The request was freed. Look it up or admit it to begin it again.
        """
        rejected = 0 if num_computed_tokens is None else request.num_computed_tokens - num_computed_tokens
        if rejected < 0:
            message = f"{num_computed_tokens}; {request.num_computed_tokens} have slots"
            raise InvalidArgumentError("num_computed_tokens", message)
        if num_lookahead_tokens < 0:
            raise _negative_lookahead(num_lookahead_tokens)
        must_send = rejected or computed or num_encoder_tokens or request.num_prompt_tokens
        must_send = must_send or (self._format.has_gaps and num_new_tokens > 1)  # it may skip states
        # On credit no block slides out of a window before a report, which contains the number of tokens in flight.
        must_send = must_send or (
            options is not DEFAULT_OPTIONS and replace(options, num_in_flight_tokens=0) != DEFAULT_OPTIONS
        )
        if self._format.has_windows:
            request.num_run_tokens = max(request.num_computed_tokens - rejected - options.num_in_flight_tokens, 0)
        num_slots = num_new_tokens + num_lookahead_tokens
        num_held = request.held_tokens - request.num_computed_tokens
        if not must_send and num_new_tokens > 0 and num_slots <= num_held:
            self._check_nameable(request)
            self.on_credit[request] = num_new_tokens, num_slots
            answer = Answer()
            self._answers.append((answer, request))
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
        self,
        requests: Sequence[Request],
        token_ids: Sequence[int] | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_in_flight_tokens: Sequence[int] = (),
    ) -> Decodes:
        """Allocates a slot for one more token of each request: `allocate_slots` for a batch of running requests.

        Most decodes are answered on credit: see `StepBuilder`.

        Args:
            requests: The requests, each once.
            token_ids: The newest token of each request. They are appended first, and stay if the step is refused. None
                if they have been appended already.
            num_lookahead_tokens: Slots to reserve beyond these tokens (drafts).
            num_in_flight_tokens: See `AllocationOptions`; one per request, or none.

        Raises:
            InvalidArgumentError: A request holds no blocks or is named twice in this step, or a token is not an integer
                in [0, 2^32). Nothing was done.
        """
        self._check_nameable(None)
        if num_lookahead_tokens < 0:
            raise _negative_lookahead(num_lookahead_tokens)
        wanted = 1 + num_lookahead_tokens
        short = [
            i for i, request in enumerate(requests) if request.credit_tokens - request.num_computed_tokens < wanted
        ]
        places = [i for i in short if requests[i].held_tokens - requests[i].num_computed_tokens < wanted]
        sent = [requests[i] for i in places]
        on_credit = dict.fromkeys(requests, (1, wanted))
        self._check_running(sent, on_credit, len(requests))
        if token_ids is not None:
            token_ids = checked_token_ids(token_ids)
            if len(token_ids) != len(requests):
                raise InvalidArgumentError("token_ids", f"{len(token_ids)} for {len(requests)} requests")
            for request, token_id in zip(requests, token_ids, strict=True):
                request.token_ids.append(token_id)
        answer = Decodes(short)
        if self._format.has_windows:
            note_run_tokens(requests, num_in_flight_tokens)
        if sent:
            for request in sent:
                del on_credit[request]
            self._put_allocations(sent, places, answer, num_lookahead_tokens)
        self._decodes.append((answer, requests))
        self.on_credit = self.on_credit | on_credit if self.on_credit else on_credit
        return answer

    def report(self, reserve_tokens: int, *, gives_back: bool) -> None:
        """Reports what requests have computed on credit, and fills reserves up that are low, or gives all back."""
        if gives_back:
            self._give_back(self.on_credit, {request: num_slots for request, (_, num_slots) in self.on_credit.items()})
        else:
            found, most = due(self.on_credit, reserve_tokens, self._format.report_tokens), reserve_tokens + REPORT_STEPS
            self._put_reserves(found, [max(each.num_computed_tokens + most, each.held_tokens) for each in found])

    def _give_back(self, requests: Iterable[Request], num_slots: Mapping[Request, int]) -> None:
        """Gives back what requests hold in reserve, or behind a window.

        Args:
            requests: The requests. The step has no other operations on them.
            num_slots: Slots after the computed tokens that requests keep, if they are more than in their block tables.
        """
        windowed = self._format.has_windows
        found = [
            each
            for each in requests
            if any(each.reserve_ids) or (windowed and each.num_computed_tokens > each.num_sent_computed_tokens)
        ]
        ends = [max(each.num_computed_tokens + num_slots.get(each, 0), each.credit_tokens) for each in found]
        self._put_reserves(found, ends)

    def _put_reserves(self, requests: list[Request], held_tokens: list[int]) -> None:
        if not requests:
            return
        computed = [request.num_computed_tokens for request in requests]
        held = [min(count, self._format.max_tokens) for count in held_tokens]
        lookahead = [end - count for end, count in zip(held, computed, strict=True)]
        run_tokens = self._put_running(Operation.RESERVE, requests, 0, lookahead)
        self.rows.append(ReserveRow(requests, computed, held, run_tokens))

    def _put_allocations(
        self, requests: Sequence[Request], places: Sequence[int], answer: Decodes, num_lookahead_tokens: int
    ) -> None:
        run_tokens = self._put_running(Operation.ALLOCATE, requests, 1, [num_lookahead_tokens] * len(requests))
        self.rows.append(DecodeRow(requests, places, answer, num_lookahead_tokens, run_tokens))
        self.waits = True

    def ask_again(self, refused: "StepBuilder", holders: Iterable[Request]) -> bool:
        """Collects what a step was refused for want of blocks, after the other requests give their reserves back.

        Args:
            refused: A step that was answered. The answers of its operations are filled again when this one is answered.
            holders: Requests that may hold a reserve.

        Returns:
            Whether there is anything to ask for, and a reserve to give back.
        """
        unserved = {request for row in refused.rows for request, _ in row.unserved}
        self._give_back([request for request in holders if request not in unserved], {})
        if not self.rows:
            return False
        budget_tokens = refused.step.admission_budget_tokens
        left_tokens = budget_tokens - sum([row.answer.num_new_tokens for row in refused.rows if isinstance(row, Row)])
        self.step.admission_budget_tokens = max(left_tokens, 0)
        self.step.max_promoted_blocks = refused.step.max_promoted_blocks
        admits = left_tokens > 0 or not budget_tokens
        for row in refused.rows:
            if isinstance(row, DecodeRow) and row.unserved:
                requests, places = zip(*row.unserved, strict=True)
                self._put_allocations(requests, places, row.answer, row.num_lookahead_tokens)
            elif isinstance(row, Row) and row.unserved and (admits or row.operation is not Operation.ADMIT):
                self._add(row.operation, row.request, answer=row.answer, **row.arguments)
        return True

    def _check_running(self, sent: Sequence[Request], requests: Collection[Request], count: int) -> None:
        if 0 in [request.num_computed_tokens for request in sent]:
            raise InvalidArgumentError("requests", "one is not running")
        if len(requests) < count or not self.can_name(requests):
            message = "one is named twice in this step"
            raise InvalidArgumentError("requests", message, reason="REQUEST_NAMED_TWICE")

    def can_name(self, requests: Collection[Request]) -> bool:
        """Whether the step names none of these requests yet."""
        named, on_credit = self._named, self.on_credit  # most often empty
        return not (
            (named and not named.isdisjoint(requests)) or (on_credit and not on_credit.keys().isdisjoint(requests))
        )

    @property
    def is_empty(self) -> bool:
        """Whether the step has no operations, not even on credit."""
        return not (self.rows or self.on_credit)

    def take_credit(self) -> None:
        """Applies the allocations on credit: the step was answered, need not be sent, or is answered later. Once."""
        if self._is_taken:
            return
        self._is_taken = True
        for answer, request in self._answers:
            answer.fill(Outcome.OK, self._take_slots(request))
        for decodes, requests in self._decodes:
            decodes.fill(len(requests), [[]] * self._format.num_groups)
            for place in decodes.may_need_blocks if self.on_credit else ():
                if requests[place] in self.on_credit:
                    decodes.new_blocks[place] = self._take_slots(requests[place])
        for request, (num_new_tokens, _) in self.on_credit.items():
            request.num_computed_tokens += num_new_tokens

    def _take_slots(self, request: Request) -> list[list[int]]:
        """The blocks that a request on credit gets from its reserve, if it lacks any."""
        _, num_slots = self.on_credit[request]
        if request.credit_tokens - request.num_computed_tokens >= num_slots:
            return [[] for _ in range(self._format.num_groups)]
        return take_slots(request, self._format.spans, num_slots, self._format.max_tokens)

    def restore_reserves(self) -> None:
        """Has requests use the reserves again that a step was to give back: the service has refused it."""
        for row in self.rows:
            for request in row.requests if isinstance(row, ReserveRow) else ():
                restore_held(request, self._format.spans, self._format.max_tokens)

    def refuse(self) -> None:
        """Answers all operations without the service: those that are not on credit find too few blocks."""
        self.take_credit()
        for row in self.rows:
            if isinstance(row, DecodeRow):
                row.answer.refused = dict.fromkeys(row.places, Outcome.NO_BLOCKS)
            elif isinstance(row, Row):
                row.answer.fill(Outcome.NO_BLOCKS, [])

    def get_computed_blocks(self, request: Request, *, counted: bool = True) -> Answer:
        """Looks up the longest cached prefix of a request that holds no blocks; its last token is never hit.

        The blocks are not held: some may be evicted before `allocate_slots`.

        Args:
            request: The request.
            counted: Count the look-up in the statistics: once, when `allocate_slots` succeeds, with the hit that the
                request then gets.
        """
        return self._add(Operation.LOOKUP if counted else Operation.LOOKUP_UNCOUNTED, request)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> Answer:
        """Caches the full blocks among the first `num_computed_tokens` tokens (after delay_cache_blocks)."""
        return self._add(Operation.CACHE, request, num_new_tokens=num_computed_tokens)

    def free(self, request: Request) -> Answer:
        """Frees the request's blocks, the last first, and forgets the request.

        Its cached blocks stay hidden from other sessions, unless they were reported as executed (`mark_executed`): the
        step that fills them may never run. A request that the server does not know is not sent.

        Raises:
            NotFoundError: The request was freed already.
        """
        if not request.declared:
            self._check_nameable(request)
            if request.freed:
                raise _freed(request)
            answer = Answer()
            answer.fill(Outcome.OK, [])
            return answer
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

    def complete(self, sequence: int, num_credit_allocations: int) -> Step:
        """Completes the step for sending."""
        step = self.step
        for row in self.rows:
            if isinstance(row, ReserveRow):  # what the step gives back is used no more, and leaves with the answer
                for request, held_tokens in zip(row.requests, row.held_tokens, strict=True):
                    set_held(request, self._format.spans, min(request.held_tokens, held_tokens))
        step.block_hashes = b"".join(self._hashes)
        if any(self._trace_contexts):
            step.trace_contexts = b"".join(context or NO_TRACE_CONTEXT for context in self._trace_contexts)
        step.sequence, step.num_credit_allocations = sequence, num_credit_allocations
        for name in _OFTEN_EMPTY:
            column = getattr(step, name)
            if column:
                column += [0] * (len(step.operations) - len(column))
        if step.num_block_ids:
            step.num_block_ids += [0] * (len(step.operations) * self._format.num_groups - len(step.num_block_ids))
        return step

    def _check_nameable(self, request: Request | None) -> None:
        """Checks that the step takes operations, and one on this request."""
        if self.is_sent:
            raise WrongStateError("STEP_SENT", "the step was sent: collect another one")
        if request in self._named or request in self.on_credit:
            message = f"{request.request_id!r} is named already in this step; name it in the next one"
            raise InvalidArgumentError("request", message, reason="REQUEST_NAMED_TWICE")

    def _add(  # noqa: PLR0913 - the columns that need more than a copy
        self,
        operation: Operation,
        request: Request | None,
        *,
        num_new_tokens: int = 0,
        num_rejected_tokens: int = 0,
        computed: ComputedBlocks | None = None,
        block_ids: Sequence[int] = (),
        options: AllocationOptions = DEFAULT_OPTIONS,
        answer: Answer | None = None,
        **columns: int,
    ) -> Answer:
        self._check_nameable(request)
        step, appended, num_computed = self.step, 0, 0
        arguments = {"num_new_tokens": num_new_tokens, "computed": computed, "options": options, **columns}
        promised: Sequence[Sequence[int]] = computed.block_ids if computed else (block_ids,)
        if options is not DEFAULT_OPTIONS:
            columns.update((name, getattr(options, name)) for name in OPTION_COLUMNS)
        if request:
            if not request.declared and operation not in DECLARING:
                raise NotFoundError("REQUEST_NOT_FOUND", f"the service has no request {request.request_id!r}")
            if request.freed and operation == Operation.ALLOCATE:  # a look-up or an admission begins it again
                raise _freed(request)
            num_computed = request.num_computed_tokens
            taken = num_computed - request.num_sent_computed_tokens
            num_computed -= num_rejected_tokens
            both = min(taken, num_rejected_tokens)  # taken on credit and rejected before the service knew of them
            columns["num_taken_tokens"], columns["num_rejected_tokens"] = taken - both, num_rejected_tokens - both
            columns["declares"] = not request.declared
            appended = self._put_request(operation, request)
        if any(promised):
            self._put_block_ids(promised)
        for name, value in columns.items():
            if value:
                self._put(name, [value])
        step.operations.append(operation)
        step.request_numbers.append(request.number if request else 0)
        step.num_appended_tokens.append(appended)
        step.num_new_tokens.append(num_new_tokens)
        answer = answer or Answer()
        self.rows.append(Row(operation, request, answer, num_computed, computed, options, arguments))
        self.waits = self.waits or operation not in _UNAWAITED
        return answer

    def _put_request(self, operation: Operation, request: Request) -> int:
        """Adds what the service does not know of a request; returns the number of its appended tokens."""
        appended = 0
        # The tokens of one that leaves may be too many for the service. With a reserve, they may fill blocks.
        is_reported = (
            operation == Operation.FREE and request.reserve_ids and request.num_tokens <= self._format.max_tokens
        )
        if operation not in LEAVING or is_reported:
            self._put_contents(request)  # may raise
            appended = len(request.token_ids) - request.num_sent_tokens
            if request.num_prompt_tokens:
                self._put("num_prompt_tokens", [request.num_prompt_tokens])
        self._named.add(request)
        if not request.declared:
            self.step.request_ids.append(request.request_id)
            self.step.lora_names.append(request.extra_keys.lora_name or "")
            self._trace_contexts.append(packed_trace_context(request.trace_parent) if request.trace_parent else b"")
        return appended

    def _put_contents(self, request: Request) -> None:
        """Adds the hashes and tokens that the service does not know."""
        first, size = request.num_sent_tokens, self._format.hash_block_size
        if size:
            sent, end, lookahead = first, len(request.token_ids), self._format.num_lookahead_tokens
            if lookahead:
                sent, end = max(sent - lookahead, 0), max(end - lookahead, 0)
            self._hashes += request.hashes[sent // size : end // size]
        if self._format.sends_tokens:
            self.step.token_ids += request.token_ids[first:]

    def _put_running(
        self, operation: Operation, requests: Sequence[Request], num_new_tokens: int, num_lookahead_tokens: list[int]
    ) -> list[int]:
        """Adds an operation on each of some running requests. Returns their numbers of tokens that have run."""
        step, size, count = self.step, self._format.hash_block_size, len(requests)
        ahead = self._format.num_lookahead_tokens
        filled = [
            r for r in requests if size and (len(r.token_ids) - ahead) // size > (r.num_sent_tokens - ahead) // size
        ]
        hash_filled_blocks(filled)
        for request in requests if self._format.sends_tokens else filled:
            self._put_contents(request)
        taken = [request.num_computed_tokens - request.num_sent_computed_tokens for request in requests]
        if any(taken):
            self._put("num_taken_tokens", taken)
        if any(num_lookahead_tokens):
            self._put("num_lookahead_tokens", num_lookahead_tokens)
        run_tokens = [request.num_run_tokens for request in requests]
        in_flight = [r.num_computed_tokens - r.num_run_tokens for r in requests] if self._format.has_windows else ()
        if any(in_flight):
            self._put("num_in_flight_tokens", in_flight)
        self._named.update(requests)
        step.operations += [operation] * count
        step.request_numbers += [request.number for request in requests]
        step.num_appended_tokens += [len(request.token_ids) - request.num_sent_tokens for request in requests]
        step.num_new_tokens += [num_new_tokens] * count
        return run_tokens

    def _put_block_ids(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Adds the blocks of the next operation, per group, or those of the first group."""
        counts = [len(ids) for ids in block_ids] + [0] * (self._format.num_groups - len(block_ids))
        self._put("num_block_ids", counts, per_operation=self._format.num_groups)
        for ids in block_ids:
            self.step.block_ids += ids

    def _put(self, name: str, values: Sequence[int], per_operation: int = 1) -> None:
        """Adds the values of the next operations to a column that is often empty."""
        column: list[int] = getattr(self.step, name)
        column += [0] * (len(self.step.operations) * per_operation - len(column))
        column += values


def _freed(request: Request) -> NotFoundError:
    return NotFoundError("REQUEST_NOT_FOUND", f"{request.request_id!r} was freed already")


def _negative_lookahead(num_lookahead_tokens: int) -> InvalidArgumentError:
    return InvalidArgumentError("num_lookahead_tokens", f"{num_lookahead_tokens} is negative")
