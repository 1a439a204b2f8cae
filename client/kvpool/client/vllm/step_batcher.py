"""Batches an engine's calls into few messages to its session, round by round.

A round is one call of the scheduler's `schedule`.

1. Most decodes need no message: their requests hold slots in reserve, see `kvpool.client.reserves`. What they have
   computed, and what needs no answer (frees, evictions), goes in order in a message in the background. One message is
   under way at a time. A round that needs another one waits for its answer first.
2. Calls that need an answer are predicted, and go together in one message at the start of the round. If only admissions
   do, the scheduler continues until it reaches the first of them: `settle` waits for the answer.
3. Predicted calls that the scheduler does not make, or makes differently, are undone. This should not happen.
4. Steps run in scheduling order. This engine may hit the blocks of earlier rounds at once, other sessions only after
   the output of the step arrives.
5. A message that the service refuses has changed nothing. Its frees and evictions go again with the next message.
6. When the session of an engine with private memory has ended, the round ends as if the pool had no free blocks: all
   blocks that were granted before still belong to the engine. Before the next round the scheduler opens a session.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from vllm.v1.request import Request as EngineRequest

from kvpool.client.protocol import ends_session
from kvpool.client.request import Request
from kvpool.client.results import Answer
from kvpool.client.session import Session
from kvpool.client.step_builder import StepBuilder, StepFormat
from kvpool.client.vllm.batched_requests import BatchedRequests, Grant
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.client.vllm.schedule_predictor import SchedulePredictor
from kvpool.core.errors import (
    AbortedError,
    DeniedError,
    ExhaustedError,
    KvpoolError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from kvpool.core.specs.kinds import allocation_spec, has_gaps
from kvpool.core.steps.allocation_options import AllocationOptions
from kvpool.core.steps.columns import Outcome, Step
from kvpool.wire.errors import DeadlineError, ServerError

_log = logging.getLogger("kvpool.client.vllm")
SESSION_ENDED: Final = (
    "The kvpool service has ended this engine's session, so other sessions may own its blocks: restart the engine."
)
_REMEDIES: Final = {
    "EPOCH_PASSED": "Engines outlast a `kvpool worker` that is killed, or ends with --keep-memory, and is back within "
    "the --rank-grace-seconds of the service.",
    "SESSION_NOT_FOUND": "Engines outlast a killed service that keeps a journal: start it without --no-journal.",
    "JOURNAL_DROPPED": "`journal dropped` in the log of the service says why it lost the sessions.",
}
"""By the reason of the session's end: what prevents the next one."""
_NO_ANSWER: Final = (
    "The kvpool service did not answer within deadline_seconds, so the blocks of this engine are unknown: "
    "make sure that the service and the workers of the pool run, and restart the engine."
)
_REFUSED_ACCESS: Final = (
    "The kvpool service refuses this engine's token (KVPOOL_TOKEN_FILE or KVPOOL_TOKEN), so its step has no answer: "
    "have the token accepted, and restart the engine. Its blocks remain allocated until its lease ends."
)
_FIRST_LOOK_AHEAD: Final = 4
_MAX_LOOK_AHEAD: Final = 64


class StepBatcher:
    """Batches the calls of one scheduler.

    Attributes:
        requests: Requests of the session, by id of the engine's request.
        admitted: Predicted admissions of waiting requests, granted or refused, that the scheduler has not used yet.
        tokens_left: Tokens left in the round.
        watermark_blocks: Number of blocks that admissions leave free.
        has_failed: Whether a call to the service failed, so that the session is unusable.
        is_private: Whether no other process writes to the engine's blocks.
        lost: The error that ended the session of an engine with private memory.
        predictor: Predicts the calls of the scheduler.
        windowed: Whether allocations depend on the tokens in flight.
        num_rounds: Number of rounds.
        waits: How often a round has waited for the service, by cause.
    """

    def __init__(self, session: Session, scheduler: Any, *, is_private: bool) -> None:
        self.requests: dict[str, Request] = {}
        self.admitted: dict[str, Answer] = {}
        self.tokens_left = 0
        self.has_failed = False
        self.lost: KvpoolError | None = None
        self.is_private = is_private
        self.windowed = any(not group.spec.keeps_all for group in session.config.groups)
        self.num_rounds = 0
        self.waits: Counter[str] = Counter()
        self._session = session
        self._builder: StepBuilder | None = None
        self._undelivered: list[tuple[Callable[[StepBuilder], object], tuple[Request, ...]]] = []
        """Calls of `deliver` that the service may not have executed, each with its requests."""
        self._num_delivering = 0
        """Number of these calls in the last message."""
        self._delivering_executed = 0
        """The step that the last message reports as executed."""
        self._scheduler = scheduler
        self.predictor = SchedulePredictor(scheduler)
        self._reserves_sequence = bool(scheduler.scheduler_reserve_full_isl)
        self.watermark_blocks = int(scheduler.scheduler_config.watermark * session.config.num_blocks)
        self._no_blocks = KVCacheBlocks([()] * len(session.config.groups))
        self._grants: dict[str, Grant] = {}  # of running requests
        self._in_flight: tuple[BatchedRequests, StepBuilder] | None = None
        """Admissions without an answer."""
        self._zeroes = bool(scheduler.needs_kv_cache_zeroing)
        self._executed = self._reported = self._launched = 0  # numbers of steps
        self._has_launched = False  # whether a round has no outputs yet
        self._look_ahead = _FIRST_LOOK_AHEAD
        self._marks_start = any(has_gaps(allocation_spec(group.spec)) for group in session.config.groups)

    def begin(self) -> None:
        """Starts a round: sends its predicted calls."""
        self.num_rounds += 1
        if self._marks_start and not self._launched:  # a step before the first round, which can be named as launched
            self.builder.evict_blocks(())
            self.end()
        self.tokens_left = self.predictor.max_tokens
        self.predictor.begin_round()
        running = self._running(0)
        if self._session.reserve_tokens and self._begin_on_credit(*running):
            return
        batch = self._new_batch()
        is_all = self._add_running(batch, *running)
        is_late = self.builder.waits
        if is_all and batch.num_tokens < self.tokens_left:
            self._add_admissions(batch)
        if is_late or not batch.admissions or self._zeroes:
            self._send_batch(batch)
            return
        builder = self._next_builder()
        with self._explained():
            self._session.begin(builder)
        self._in_flight = batch, builder
        self._grants = dict(batch.grants)  # their blocks are set with the answer

    def _begin_on_credit(
        self,
        predicted: list[tuple[EngineRequest, int]],
        found: list[Request],
        is_all: bool,
    ) -> bool:
        """Starts a round that needs no message; returns whether this is one. No calls were added otherwise."""
        if not is_all or self.predictor.admissions(1):
            return False
        is_waiting = self._session.must_wait
        if not is_waiting and (self._builder is not None or self._undelivered):
            return False
        for (request, num_tokens), session_request in zip(predicted, found, strict=True):
            if num_tokens > 1 or session_request.num_computed_tokens != request.num_computed_tokens:
                return False
        if not is_waiting:
            self._settle_background()
        new = self._session.decode_on_credit(
            found,
            num_lookahead_tokens=self.predictor.num_lookahead_tokens,
            num_in_flight_tokens=[request.num_in_flight_tokens for request, _ in predicted] if self.windowed else (),
            executed_sequence=0 if self.is_private else self._executed,  # which no other session waits for
        )
        if new is None:
            return False
        self._grants = dict.fromkeys([request.request_id for request, _ in predicted], (self._no_blocks, 1))
        for place, block_ids in new.items():
            self._grants[found[place].request_id] = (KVCacheBlocks(block_ids), 1)
        self.tokens_left -= len(found)
        return True

    def settle(self) -> None:
        """Waits for the answer to the admissions that `begin` has sent, if it has not arrived. Raises as `send`."""
        if self._in_flight is None:
            return
        (batch, builder), self._in_flight = self._in_flight, None
        unused, self._grants = self._grants, {}
        self.waits["admission"] += 1
        with self._explained():
            self._session.settle()
        if self.lost:
            builder.refuse()
        self._note_delivered()
        self._take(batch)
        self._grants = {each: grant for each, grant in self._grants.items() if each in unused}

    def _settle_background(self) -> None:
        """Waits for the answer to the message in the background, if there is one. Raises as `send`."""
        if self._session.is_in_background and not self.lost:
            if self._session.must_wait:
                self.waits["background"] += 1
            with self._explained():
                self._session.settle()
            self._note_delivered()

    def end(self) -> int:
        """Ends a round: undoes unused predictions, and sends changes that other sessions wait for.

        Returns:
            Number of the last step of the round. When that step has run, everything that the round scheduled has.
        """
        self.settle()
        if self.admitted:
            _log.warning("admissions predicted wrongly", extra={"requests": len(self.admitted)})
            for request_id in list(self.admitted):
                self.cancel_admission(request_id)
        self._grants.clear()
        if not self._session.reserve_tokens or (self._undelivered and not self._session.must_wait):
            self.flush()  # else the next round reports what is executed, if others wait for it
        self._launched = self._session.sequence
        self._has_launched = True
        return self._launched

    def mark_executed(self, sequence: int, *, is_newest: bool) -> None:
        """Records that the outputs of the round that ended with this step have arrived.

        Args:
            sequence: The step.
            is_newest: Whether no later round has been scheduled, so that all steps that were sent have run.
        """
        self._executed = max(self._executed, self._session.sequence if is_newest else sequence)
        self._has_launched = not is_newest

    def check_lease(self) -> None:
        """Asks the service, if the lease may be over, whether the session is open. Otherwise the step must not run.

        Raises:
            KvpoolError: The session has ended, so other sessions may own the blocks; or the service does not answer.
        """
        # The lease counts from the time at which a step was sent. A step that waited for an absent service is answered
        # late, so that the lease can seem to be over although it is not.
        if self._session.lease_left_seconds <= 0 and not self.is_private:
            with self._explained():
                self._session.mark_executed(self._executed)

    def flush(self) -> None:
        """Sends changes that other sessions wait for: freed requests and executed steps."""
        self._settle_background()
        has_calls = self._undelivered or not (self._builder is None or self._builder.is_empty)
        if has_calls or self._executed > self._reported:
            self.send()

    def deliver_all(self) -> None:
        """Sends these changes, and waits until the service has executed them."""
        self.flush()
        self._settle_background()

    def send(self) -> None:
        """Sends the collected calls, or answers them locally if possible.

        Raises:
            KvpoolError: The engine cannot continue; a note explains what to do.
        """
        self.settle()
        builder = self._next_builder()
        if not self.lost:
            with self._explained():
                self._session.send(builder)
        if self.lost:
            builder.refuse()
        if not self._session.is_in_background:
            self._note_delivered()

    def set_weights_version(self, weights_version: str) -> None:
        """Sets the version of the weights with which later rounds compute, see `Session`. Raises as `send`."""
        with self._explained():
            self._session.set_weights_version(weights_version)

    def session_request(self, request: EngineRequest) -> Request:
        """Returns the session's request for an engine's request; creates it on first use."""
        session_request = self.requests.get(request.request_id)
        if session_request is None:
            lora_name = request.lora_request.lora_name if request.lora_request else None
            session_request = self._session.request_hashed_elsewhere(
                request.request_id,
                request._all_token_ids,  # noqa: SLF001 - the list itself, because its read-only view has a slow `len`
                request.block_hashes if self._session.config.enable_caching else [],  # made for any KV connector
                lora_name=lora_name,
                trace_parent=(request.trace_headers or {}).get("traceparent", ""),
            )
            if session_request.num_tokens > request.num_prompt_tokens:  # of an earlier session
                session_request.num_prompt_tokens = request.num_prompt_tokens
            self.requests[request.request_id] = session_request
        return session_request

    @property
    def builder(self) -> StepBuilder:
        """Collects the next message. Waits for the answer to the message before."""
        if self._builder is None:
            self.settle()
            self._settle_background()
            self._builder = self._new_builder()
            for call, _ in self._undelivered:
                call(self._builder)
        return self._builder

    def _new_builder(self) -> StepBuilder:
        if not self.lost:
            with self._explained():
                return self._session.new_step()
        return StepBuilder(StepFormat.of(self._session.config), 0, Step(0))

    def note_refused(self, request_id: str, outcome: Outcome | None) -> None:
        """Has vLLM end a request that never fits with an error when it takes the outputs of a step."""
        if outcome is Outcome.NEVER_FITS:
            error = f"{request_id} would hold more blocks than this engine ever can"
            _log.error("request never fits", extra={"pool": self._session.config.name, "error": error})
            self._scheduler.encoder_cache_mismatch_reqs.add(request_id)  # vLLM ends these with an error

    def builder_for(self, *session_requests: Request) -> StepBuilder:
        """Returns the builder of the next message, after earlier calls of the requests have been answered."""
        if not self.builder.can_name(session_requests):
            self.send()
        return self.builder

    def deliver(self, call: Callable[[StepBuilder], object], *session_requests: Request) -> None:
        """Adds a call to the next message; if the service refuses that message, to the one after it.

        Args:
            call: Adds the call to a builder. It needs no answer, and the service never refuses it by itself.
            session_requests: The requests that it names.
        """
        named = {each for _, requests in self._undelivered for each in requests}
        if self._builder is not None or not self._session.must_wait or not named.isdisjoint(session_requests):
            call(self.builder_for(*session_requests))
        self._undelivered.append((call, session_requests))

    def take_grant(self, request: EngineRequest, num_tokens: int) -> Grant | None:
        """Returns the grant of a running request for `num_tokens`; None if that call was not predicted."""
        grant = self._grants.pop(request.request_id, None)
        if grant is None:
            self.settle()
            batch = self._new_batch()
            self._add_running(batch, *self._running(self._scheduler.running.index(request)))
            self._send_batch(batch)
            grant = self._grants.pop(request.request_id, None)
        if grant and grant[1] == num_tokens:
            return grant
        self.settle()
        return None

    def admit_waiting(self, request: EngineRequest) -> None:
        """Admits a request and the requests behind it in one message, if their calls can be predicted."""
        batch = self._new_batch()
        if self.tokens_left > 0:
            self._add_admissions(batch, request)
        self._send_batch(batch)

    def forget(self, request_id: str) -> None:
        """Drops the predictions of a request."""
        self.admitted.pop(request_id, None)
        self._grants.pop(request_id, None)

    def cancel_admission(self, request_id: str) -> None:
        """Undoes a predicted admission; the session keeps a request whose admission was refused."""
        if self.admitted[request_id].ok:
            self.free(self.requests[request_id])
        del self.admitted[request_id]

    def free(self, session_request: Request) -> None:
        """Frees the blocks of a request and forgets the request."""
        self.deliver(lambda builder: builder.free(session_request), session_request)
        self.requests.pop(session_request.request_id, None)  # forgotten already if this was deferred

    def _add_running(
        self,
        batch: BatchedRequests,
        predicted: list[tuple[EngineRequest, int]],
        found: list[Request],
        is_all: bool,
    ) -> bool:
        """Adds predicted running requests; returns whether they are all that will allocate. See `_running`."""
        builder = self.builder_for(*found)
        decodes: list[tuple[EngineRequest, Request]] = []
        may_batch = not self.windowed or self._session.reserve_tokens > 0
        for (request, num_tokens), session_request in zip(predicted, found, strict=False):
            is_decode = num_tokens == 1 and session_request.num_computed_tokens == request.num_computed_tokens
            if is_decode and may_batch:
                decodes.append((request, session_request))
            else:
                self._add_decodes(batch, builder, decodes)
                decodes = []
                batch.allocate(builder, request, session_request, num_tokens)
        self._add_decodes(batch, builder, decodes)
        return is_all

    def _add_decodes(
        self, batch: BatchedRequests, builder: StepBuilder, decodes: list[tuple[EngineRequest, Request]]
    ) -> None:
        in_flight = [request.num_in_flight_tokens for request, _ in decodes] if self.windowed else []
        batch.decode(builder, [session_request for _, session_request in decodes], in_flight)

    def _running(self, first: int) -> tuple[list[tuple[EngineRequest, int]], list[Request], bool]:
        """Predicts the running requests from index `first` that allocate tokens.

        Returns:
            The requests with their numbers of tokens; the session's requests for the first of them; and whether these
            are all that will allocate.
        """
        predicted, is_all = self.predictor.running(first, self.tokens_left, self._grants)
        found: list[Request] = []
        requests = self.requests
        for request, _ in predicted:
            session_request = requests.get(request.request_id)
            if session_request is None or session_request.num_computed_tokens < request.num_computed_tokens:
                return predicted, found, False
            found.append(session_request)
        return predicted, found, is_all

    def _add_admissions(self, batch: BatchedRequests, first: EngineRequest | None = None) -> None:
        """Adds the predicted admissions; only if they start with `first`, if given."""
        predicted = self.predictor.admissions(self._look_ahead)
        if not predicted or first not in (None, predicted[0]):
            return
        max_tokens = self.predictor.long_prefill_tokens()
        is_first = not self._scheduler.running  # which may go below the watermark
        session_requests = [self.session_request(request) for request in predicted]
        builder = self.builder_for(*session_requests)
        for session_request in session_requests:
            options = AllocationOptions(
                num_watermark_blocks=0 if is_first else self.watermark_blocks,
                full_sequence_must_fit=self._reserves_sequence,
            )
            answer = builder.admit(session_request, max_tokens, options=options)
            batch.admissions.append((session_request.request_id, answer))
            is_first = False
        builder.step.admission_budget_tokens = self.tokens_left - batch.num_tokens

    def _new_batch(self) -> BatchedRequests:
        return BatchedRequests(self.predictor.num_lookahead_tokens, self._no_blocks)

    def _next_builder(self) -> StepBuilder:
        """Returns the collected calls, and starts a new message.

        They report the executed step. The session sends no message only if no other session waits for that report.
        """
        builder, self._builder = self.builder, None
        self._num_delivering, self._delivering_executed = len(self._undelivered), self._executed
        builder.step.executed_sequence, builder.step.launched_sequence = self._executed, self._launched
        if self._has_launched and self._launched <= self._executed:  # a round on credit, which has no number
            builder.step.launched_sequence = self._session.sequence + 1
        return builder

    def _note_delivered(self) -> None:
        """Records that the service has executed the last message."""
        del self._undelivered[: self._num_delivering]
        self._num_delivering, self._reported = 0, self._delivering_executed

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds a note with instructions to errors that end the engine. Records the end of a session in `lost`."""
        try:
            yield
        except (UnauthenticatedError, DeniedError) as error:
            self.has_failed = True
            error.add_note(_REFUSED_ACCESS)
            raise
        except (NotFoundError, AbortedError, UnavailableError, DeadlineError, ExhaustedError, ServerError) as error:
            if isinstance(error, ExhaustedError) and error.retry_seconds is None:  # refused: nothing has changed
                raise
            self.has_failed = True
            # After a bug of its own, a service without a journal has ended the session.
            if self.is_private and (ends_session(error) or isinstance(error, ServerError)):
                self.lost = error
                return
            has_ended = isinstance(error, NotFoundError | AbortedError)
            error.add_note(SESSION_ENDED if has_ended else _NO_ANSWER)
            if remedy := _REMEDIES.get(error.reason):
                error.add_note(remedy)
            raise

    def _send_batch(self, batch: BatchedRequests) -> None:
        """Sends the batch if it has calls, and records the answers."""
        if not batch.is_empty and (self.builder.rows or self._session.reserve_tokens):
            if self.builder.waits:
                self.waits["admission" if batch.admissions else "decode"] += 1
            self.send()
        self._take(batch)

    def _take(self, batch: BatchedRequests) -> None:
        """Records the answers of a batch."""
        refused = batch.resolve()
        for request_id, outcome in refused.items():
            self.note_refused(request_id, outcome)
        self._grants.update(batch.grants)
        self.tokens_left -= batch.num_tokens
        num_admitted = 0
        for request_id, answer in batch.admissions:
            if answer.outcome is Outcome.SKIPPED:
                break
            self.admitted[request_id] = answer
            self.note_refused(request_id, answer.outcome)
            if answer.ok:
                num_admitted += 1
                self.tokens_left -= answer.num_new_tokens
        if batch.admissions:
            more = 2 * self._look_ahead if num_admitted == len(batch.admissions) else num_admitted + 1
            self._look_ahead = min(more, _MAX_LOOK_AHEAD)
