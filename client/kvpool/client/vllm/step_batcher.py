"""What an engine asks of its session, round by round.

1. A round asks with few messages: what it is sure to ask is foreseen and asked together, and what needs no answer
   (frees, blocks to cache) goes with the next message that does, before it, in the order in which it came.
2. The scheduler goes on while the service is at the first message, as if all was granted: `settle` waits for the
   answer, before anybody looks at blocks or anything is changed. Where some is refused that was given out, the
   scheduler begins the round again, and is told what is known then.
3. What was foreseen and is not asked for, or otherwise, is given back. It should not happen.
4. Steps run in the order in which they are scheduled. What the steps of earlier rounds fill may be found by this engine
   at once, by other sessions when the step's output is there.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from vllm.v1.request import Request as EngineRequest

from kvpool.client.errors import DeadlineError
from kvpool.client.request import Request
from kvpool.client.results import Answer
from kvpool.client.session import Session
from kvpool.client.step_builder import StepBuilder
from kvpool.client.vllm.batched_requests import BatchedRequests, Given
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.client.vllm.schedule_predictor import SchedulePredictor
from kvpool.client.vllm.versions import COUNTS_ADMISSIONS
from kvpool.core.errors import AbortedError, NotFoundError, UnavailableError
from kvpool.core.steps.allocation_options import AllocationOptions
from kvpool.core.steps.columns import Outcome

_log = logging.getLogger("kvpool.client.vllm")
_SESSION_GONE: Final = (
    "kvpool's service knows this engine's session no more, so its blocks may be others': start the engine anew. "
    "A service that is to be restarted under its engines needs --journal."
)
_SERVICE_GONE: Final = (
    "kvpool's service did not answer within deadline_seconds, so nobody knows which blocks this engine may use: "
    "see that it runs, and start the engine anew."
)
_FIRST_LOOK_AHEAD: Final = 4
_MOST_LOOK_AHEAD: Final = 64


class RefusedError(Exception):
    """What a running request was given was refused: the scheduler must begin the round again."""


class StepBatcher:
    """The rounds of one scheduler.

    Attributes:
        requests: What the session knows the engine's requests as, by id.
        builder: What goes with the next message.
        admitted: Waiting requests that were admitted ahead, or refused, and not asked for yet.
        tokens_left: Tokens that the round has left.
        watermark_blocks: Blocks that admissions leave free.
        has_failed: Whether the service could not be asked, so that nothing more can be.
        windowed: Whether it matters which tokens are in flight.
    """

    def __init__(self, session: Session, scheduler: Any) -> None:
        self.requests: dict[str, Request] = {}
        self.builder = StepBuilder()
        self.admitted: dict[str, tuple[Request, Answer]] = {}
        self.tokens_left = 0
        self.has_failed = False
        self.windowed = any(not group.spec.keeps_all for group in session.config.groups)
        self._session = session
        self._scheduler = scheduler
        self._predictor = SchedulePredictor(scheduler)
        self._admits_ahead = COUNTS_ADMISSIONS and session.config.enable_caching
        self._reserves_sequence = bool(getattr(scheduler, "scheduler_reserve_full_isl", False))
        watermark = getattr(scheduler.scheduler_config, "watermark", 0.0)
        self.watermark_blocks = int(watermark * session.config.num_blocks)
        self._nothing = KVCacheBlocks([()] * len(session.config.groups))
        self._answers: dict[str, Given] = {}  # of running requests
        self._begun: tuple[BatchedRequests, StepBuilder, int] | None = (
            None  # whose answer is not there; the sequence before it
        )
        self._executed = self._told = self._launched = 0  # numbers of steps
        self._look_ahead = _FIRST_LOOK_AHEAD

    def begin(self) -> None:
        """Asks for what the round that begins is sure to ask."""
        self.tokens_left = self._predictor.most_tokens
        ahead = self._new_ahead()
        is_all = self._run_ahead(ahead, 0)
        if is_all and ahead.num_tokens < self.tokens_left:
            self._admit_ahead(ahead)
        is_asking = is_all and ahead.num_tokens and self.builder.rows
        if is_asking and self._predictor.can_begin_again(is_admitting=bool(ahead.admissions)):
            self._begin_ahead(ahead)
        else:
            self._send_ahead(ahead)

    def settle(self) -> None:
        """Waits for the answer of the message that the round began with; does nothing if that is there.

        Raises:
            RefusedError: A running request was given blocks that were refused.
            KvpoolError: As `send`.
        """
        if self._begun is None:
            return
        (ahead, builder, before), self._begun = self._begun, None
        with self._explained():
            self._session.settle()
        self._note_told(builder, before)
        left, self._answers = self._answers, {}  # what was not given out yet
        refused = self._take(ahead)
        if not refused.keys() <= left.keys():
            raise RefusedError
        self._answers = {each: given for each, given in self._answers.items() if each in left} if left else {}

    def end(self) -> int:
        """Gives back what was foreseen and not asked for, and sends what others wait for.

        Returns:
            Number of the step that the round ends with: what it scheduled has run when that has.
        """
        self.settle()
        if self.admitted:
            _log.warning("admissions foreseen wrongly", extra={"requests": len(self.admitted)})
            for request_id in list(self.admitted):
                self.give_back(request_id)
        self._answers.clear()
        self.flush()
        self._launched = self._session.sequence
        return self._launched

    def note_executed(self, sequence: int) -> None:
        """Takes note that the outputs of a round are there, which ended with a step of this number."""
        self._executed = max(self._executed, sequence)

    def check_lease(self) -> None:
        """Raises AbortedError if the blocks may have been given to others: what was scheduled must not run."""
        if self._session.lease_left_seconds <= 0:
            message = "the service was not heard of for as long as the lease; the blocks may be others': start anew"
            raise AbortedError("LEASE_EXPIRED", message)

    def flush(self) -> None:
        """Sends what others wait for: what was freed, and what has run."""
        if self.builder.rows or self.builder.on_credit or self._executed > self._told:
            self.send()

    def send(self) -> None:
        """Sends what was collected, or answers it here, if that can be.

        Raises:
            KvpoolError: The engine cannot go on; a note says what to do.
        """
        self.settle()
        builder, before = self._next_builder()
        with self._explained():
            self._session.send(builder)
        self._note_told(builder, before)

    def known(self, request: EngineRequest) -> Request:
        """What the session knows a request as; made when it is asked for first."""
        known = self.requests.get(request.request_id)
        if known is None:
            lora_name = request.lora_request.lora_name if request.lora_request else None
            known = self._session.request_hashed_elsewhere(
                request.request_id,
                request._all_token_ids,  # noqa: SLF001 - the list itself: its constant view takes long to measure
                request.block_hashes,
                lora_name=lora_name,
            )
            self.requests[request.request_id] = known
        return known

    def builder_for(self, known: Request) -> StepBuilder:
        """What goes with the next message, a request's answers so far settled, so that it may be given room again."""
        if known in self.builder.on_credit:
            self.send()
        return self.builder

    def answer(self, request: EngineRequest, num_tokens: int) -> Given | None:
        """What a running request gets that asks for so many tokens; None if that was not foreseen."""
        given = self._answers.pop(request.request_id, None)
        if given is None:
            self.settle()
            ahead = self._new_ahead()
            self._run_ahead(ahead, self._scheduler.running.index(request))
            self._send_ahead(ahead)
            given = self._answers.pop(request.request_id, None)
        if given and given[1] == num_tokens:
            return given
        self.settle()
        return None

    def ask_waiting(self, request: EngineRequest) -> None:
        """Admits a request and those behind it, in one message, if what they will ask is foreseen."""
        ahead = self._new_ahead()
        if self.tokens_left > 0:
            self._admit_ahead(ahead, request)
        self._send_ahead(ahead)

    def forget_answers(self, request_id: str) -> Request | None:
        """Drops what was foreseen of a request that will not ask for it; returns what the session knows it as."""
        self.admitted.pop(request_id, None)
        self._answers.pop(request_id, None)
        return self.requests.get(request_id)

    def give_back(self, request_id: str) -> None:
        """Takes an admission back; one that was refused stays known."""
        known, answer = self.admitted.pop(request_id)
        if answer.ok:
            self.free(known)

    def free(self, known: Request) -> None:
        """Frees what a request holds, and forgets it."""
        self.builder.free(known)
        del self.requests[known.request_id]

    def _run_ahead(self, ahead: BatchedRequests, first: int) -> bool:
        """Adds the running requests from a place on, as far as that is foreseen; whether they are all that will ask."""
        foreseen, is_all = self._predictor.running(first, self.tokens_left, self._answers)
        found: list[Request] = []
        requests = self.requests
        for request, _ in foreseen:
            known = requests.get(request.request_id)
            if known is None or known.num_computed_tokens < request.num_computed_tokens:
                is_all = False
                break
            found.append(known)
        if not self.builder.can_decode(found):
            self.send()
        together: dict[str, Request] = {}
        for (request, num_tokens), known in zip(foreseen, found, strict=False):
            is_usual = num_tokens == 1 and known.num_computed_tokens == request.num_computed_tokens
            if is_usual and not self.windowed:
                together[request.request_id] = known
            else:
                ahead.decode(self.builder, together)
                together = {}
                ahead.allocate(self.builder, request, known, num_tokens)
        ahead.decode(self.builder, together)
        return is_all

    def _admit_ahead(self, ahead: BatchedRequests, first: EngineRequest | None = None) -> None:
        """Adds the admissions that are foreseen; only those from `first` on, if that is given."""
        foreseen = list(self._predictor.admissions(self._look_ahead)) if self._admits_ahead else []
        if not foreseen or first not in (None, foreseen[0]):
            return
        reserves, watermark = self._reserves_sequence, self.watermark_blocks
        options = [AllocationOptions(num_watermark_blocks=watermark, full_sequence_must_fit=reserves)] * len(foreseen)
        if not self._scheduler.running:  # the first of all may go below the watermark
            options[0] = AllocationOptions(full_sequence_must_fit=reserves)
        known = [(request, self.known(request)) for request in foreseen]
        most_tokens = self._predictor.long_prefill_tokens()
        ahead.admit(self.builder, known, self.tokens_left - ahead.num_tokens, most_tokens, options)

    def _new_ahead(self) -> BatchedRequests:
        return BatchedRequests(self._predictor.num_lookahead_tokens, self._nothing)

    def _begin_ahead(self, ahead: BatchedRequests) -> None:
        """Sends what is asked ahead; until that is answered, the scheduler is given what it will get if all is well."""
        builder, before = self._next_builder()
        with self._explained():
            self._session.begin(builder)
        self._begun = ahead, builder, before
        self._answers = ahead.promised()

    def _next_builder(self) -> tuple[StepBuilder, int]:
        """What was collected, and which step the session was at before it."""
        builder, self.builder = self.builder, StepBuilder()
        builder.executed_sequence, builder.launched_sequence = self._executed, self._launched
        return builder, self._session.sequence

    def _note_told(self, builder: StepBuilder, before: int) -> None:
        """Takes note of what the service was told, if it was sent a step."""
        if self._session.sequence > before:
            self._told = builder.executed_sequence

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds to what ends the engine what to do about it."""
        try:
            yield
        except (NotFoundError, AbortedError, UnavailableError, DeadlineError) as error:
            self.has_failed = True
            is_session_gone = isinstance(error, NotFoundError | AbortedError)
            error.add_note(_SESSION_GONE if is_session_gone else _SERVICE_GONE)
            raise

    def _send_ahead(self, ahead: BatchedRequests) -> None:
        """Sends what is asked ahead, if it needs an answer, and takes note of the answers."""
        if self.builder.rows and not ahead.is_empty:
            self.send()
        self._take(ahead)

    def _take(self, ahead: BatchedRequests) -> dict[str, Outcome]:
        """Takes note of what was asked ahead, and answered; returns whom of those running it refused."""
        refused = ahead.fill()
        given = ahead.promised()
        for request_id, outcome in refused.items():
            if outcome is Outcome.SKIPPED:  # it was not tried
                del given[request_id]
            else:
                given[request_id] = (None, given[request_id][1])
        self._answers.update(given)
        self.tokens_left -= sum([num_tokens for blocks, num_tokens in given.values() if blocks is not None])
        num_admitted = 0
        for request_id, known, answer in ahead.admissions:
            if answer.outcome is Outcome.SKIPPED:
                break
            self.admitted[request_id] = (known, answer)
            if answer.ok:
                num_admitted += 1
                self.tokens_left -= answer.num_new_tokens
        if ahead.admissions:
            more = 2 * self._look_ahead if num_admitted == len(ahead.admissions) else num_admitted + 1
            self._look_ahead = min(more, _MOST_LOOK_AHEAD)
        return refused
