"""Predicts an engine's allocations, so that few messages carry them, round by round.

A round is one call of the scheduler's `schedule`.

1. Most decodes need no message: their requests hold slots in reserve, see `kvpool.client.reserves`.
2. Calls that need an answer are predicted, and go together in one message at the start of the round. If only admissions
   do, the scheduler continues until it reaches the first of them, which waits for the answer.
3. Predicted calls that the scheduler does not make, or makes differently, are undone. This should not happen.
"""

import logging
from functools import partial
from typing import Any, Final

from vllm.v1.request import Request as EngineRequest

from kvpool.client.request import Request
from kvpool.client.results import Answer
from kvpool.client.step_builder import StepFormat
from kvpool.client.vllm.batched_requests import BatchedRequests, Grant
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.client.vllm.engine_calls import EngineCalls
from kvpool.client.vllm.schedule_predictor import SchedulePredictor, is_admissible
from kvpool.core.steps.allocation_options import AllocationOptions
from kvpool.core.steps.columns import Outcome

_log = logging.getLogger("kvpool.client.vllm")
_FIRST_LOOK_AHEAD: Final = 4
_MAX_LOOK_AHEAD: Final = 64


class StepBatcher:
    """Batches the calls of one scheduler.

    Attributes:
        admitted: Predicted admissions of waiting requests, granted or refused, that the scheduler has not used yet.
        tokens_left: Tokens left in the round.
        watermark_blocks: Number of blocks that admissions leave free.
        predictor: Predicts the calls of the scheduler.
        windowed: Whether allocations depend on the tokens in flight.
        num_rounds: Number of rounds.
    """

    def __init__(self, calls: EngineCalls, scheduler: Any) -> None:
        config = calls.session.config
        self.admitted: dict[str, Answer] = {}
        self.tokens_left = 0
        self.watermark_blocks = int(scheduler.scheduler_config.watermark * config.num_blocks)
        self.predictor = SchedulePredictor(scheduler)
        self.windowed = any(not group.spec.keeps_all for group in config.groups)
        self.num_rounds = 0
        self._calls = calls
        self._has_reserves = calls.session.reserve_tokens > 0
        self._pool = config.name
        self._scheduler = scheduler
        self._reserves_sequence = bool(scheduler.scheduler_reserve_full_isl)
        self._no_blocks = KVCacheBlocks([()] * len(config.groups))
        self._grants: dict[str, Grant] = {}  # of running requests
        self._found: tuple[str, Answer] | None = None
        """The request that `promote` has looked up last."""
        self._zeroes = bool(scheduler.needs_kv_cache_zeroing)
        self._look_ahead = _FIRST_LOOK_AHEAD
        self._marks_start = StepFormat.of(config).has_gaps

    def begin(self) -> None:
        """Starts a round: sends its predicted calls."""
        self.num_rounds += 1
        self._grants.clear()  # of a round that an error has ended
        if self._marks_start:
            self._calls.mark_start()
        self.tokens_left = self.predictor.max_tokens
        self.predictor.begin_round()
        predicted, found, is_all = self._running(0)
        if self._has_reserves and is_all and self._begin_on_credit(predicted, found):
            return
        batch = self._new_batch(predicted, found)
        is_late = self._calls.builder.waits
        if is_all and batch.num_tokens < self.tokens_left:
            self._add_admissions(batch)
        if is_late or not batch.admissions or self._zeroes:
            self._send_batch(batch)
            return
        self._calls.begin(partial(self._take_late, batch))
        self._grants = dict(batch.grants)  # their blocks are set with the answer

    def _begin_on_credit(self, predicted: list[tuple[EngineRequest, int]], found: list[Request]) -> bool:
        """Starts a round that needs no message; returns whether this is one. No calls were added otherwise."""
        if self.predictor.admissions(1):
            return False
        for (request, num_tokens), session_request in zip(predicted, found, strict=True):
            if num_tokens > 1 or session_request.num_computed_tokens != request.num_computed_tokens:
                return False
        in_flight = [request.num_in_flight_tokens for request, _ in predicted] if self.windowed else ()
        new = self._calls.decode_on_credit(found, self.predictor.num_lookahead_tokens, in_flight)
        if new is None:
            return False
        self._grants = dict.fromkeys([request.request_id for request, _ in predicted], (self._no_blocks, 1))
        for place, block_ids in new.items():
            self._grants[found[place].request_id] = (KVCacheBlocks(block_ids), 1)
        self.tokens_left -= len(found)
        return True

    def end(self) -> int:
        """Ends a round: undoes unused predictions, and sends changes that other sessions wait for.

        Returns:
            Number of the last step of the round. When that step has run, everything that the round scheduled has.
        """
        self._calls.settle()
        if self.admitted:
            _log.warning("admissions predicted wrongly", extra={"requests": len(self.admitted)})
            for request_id in list(self.admitted):
                self.cancel_admission(request_id)
        self._grants.clear()
        return self._calls.end_round()

    def note_refused(self, request_id: str, outcome: Outcome | None) -> None:
        """Has vLLM end a request that never fits with an error when it takes the outputs of a step."""
        if outcome is Outcome.NEVER_FITS:
            error = f"{request_id} would hold more blocks than this engine ever can"
            _log.error("request never fits", extra={"pool": self._pool, "error": error})
            self._scheduler.encoder_cache_mismatch_reqs.add(request_id)  # vLLM ends these with an error

    def take_grant(self, request: EngineRequest, num_tokens: int) -> Grant | None:
        """Returns the grant of a running request for `num_tokens`; None if that call was not predicted."""
        grant = self._grants.pop(request.request_id, None)
        if grant is None:
            self._calls.settle()
            predicted, found, _ = self._running(self._scheduler.running.index(request))
            self._send_batch(self._new_batch(predicted, found))
            grant = self._grants.pop(request.request_id, None)
        if grant and grant[1] == num_tokens:
            return grant
        self._calls.settle()
        return None

    def admit_waiting(self, request: EngineRequest) -> None:
        """Admits a request and the requests behind it in one message, if their calls can be predicted."""
        batch = self._new_batch([], [])
        if self.tokens_left > 0:
            self._add_admissions(batch, request)
        self._send_batch(batch)

    def lookup(self, request: EngineRequest) -> Answer:
        """Looks up the cached prefix of a request that was not admitted ahead."""
        found, self._found = self._found, None
        if found and found[0] == request.request_id:
            return found[1]
        session_request = self._calls.session_request(request)
        answer = self._calls.builder_for(session_request).get_computed_blocks(session_request)
        self._calls.send()
        return answer

    def promote(self, request: EngineRequest) -> Answer | None:
        """Admits a waiting request for its hit alone, if that is so large that its copies are made in the background.

        Returns:
            The hit; None if the request is to be admitted as usual.
        """
        promotions = self._calls.promotions
        if not is_admissible(request):
            return None
        self._calls.settle()
        if request.request_id not in self.admitted:
            self.admit_waiting(request)
        answer = self.admitted.get(request.request_id)
        if answer is None:
            answer = self.lookup(request)
            self._found = request.request_id, answer
            first_host = self._calls.session.config.num_blocks
            num_host = sum(block_id >= first_host for blocks in answer.hit_blocks for block_id in blocks)
            if num_host <= promotions.max_blocks or not self._allocate_hit(request, answer):
                return None
            self._found = None
        elif not answer.ok or answer.num_new_tokens:
            return None
        else:
            del self.admitted[request.request_id]
        promotions.admit(self._calls.requests[request.request_id])
        return answer

    def _allocate_hit(self, request: EngineRequest, found: Answer) -> bool:
        """Allocates the hit of a look-up, and no slots for further tokens; returns whether it was granted."""
        session_request = self._calls.session_request(request)
        options = AllocationOptions(
            num_watermark_blocks=self.watermark_blocks, full_sequence_must_fit=self._reserves_sequence
        )
        answer = self._calls.builder_for(session_request).allocate_slots(
            session_request, 0, computed=found.computed, num_computed_tokens=0, options=options
        )
        self._calls.send()
        return answer.ok

    def forget(self, request_id: str) -> None:
        """Drops the predictions of a request."""
        self.admitted.pop(request_id, None)
        self._grants.pop(request_id, None)

    def cancel_admission(self, request_id: str) -> None:
        """Undoes a predicted admission; the session keeps a request whose admission was refused."""
        if self.admitted[request_id].ok:
            self._calls.free(self._calls.requests[request_id])
        del self.admitted[request_id]

    def _running(self, first: int) -> tuple[list[tuple[EngineRequest, int]], list[Request], bool]:
        """Predicts the running requests from index `first` that allocate tokens.

        Returns:
            The requests with their numbers of tokens; the session's requests for the first of them; and whether these
            are all that will allocate.
        """
        predicted, is_all = self.predictor.running(first, self.tokens_left, self._grants)
        found: list[Request] = []
        requests = self._calls.requests
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
        others_run = not is_first
        session_requests = [self._calls.session_request(request) for request in predicted]
        builder = self._calls.builder_for(*session_requests)
        for session_request in session_requests:
            options = AllocationOptions(
                num_watermark_blocks=0 if is_first else self.watermark_blocks,
                full_sequence_must_fit=self._reserves_sequence,
            )
            answer = builder.admit(session_request, max_tokens, options=options)
            batch.admissions.append((session_request.request_id, answer))
            is_first = False
        builder.step.admission_budget_tokens = self.tokens_left - batch.num_tokens
        if others_run:
            builder.step.max_promoted_blocks = self._calls.promotions.max_blocks

    def _new_batch(self, predicted: list[tuple[EngineRequest, int]], found: list[Request]) -> BatchedRequests:
        """Starts a batch with the calls of running requests, see `_running`."""
        batch = BatchedRequests(self.predictor.num_lookahead_tokens, self._no_blocks, windowed=self.windowed)
        if found:
            builder = self._calls.builder_for(*found)
            batch.add_running(builder, predicted, found, batches=not self.windowed or self._has_reserves)
        return batch

    def _send_batch(self, batch: BatchedRequests) -> None:
        """Sends the batch if it has calls, and records the answers."""
        if not batch.is_empty and (self._calls.builder.rows or self._has_reserves):
            if self._calls.builder.waits:
                self._calls.waits["admission" if batch.admissions else "decode"] += 1
            self._calls.send()
        self._take(batch)

    def _take_late(self, batch: BatchedRequests) -> None:
        """Records the answers of a batch of which the scheduler has taken grants already."""
        unused, self._grants = self._grants, {}
        self._take(batch)
        self._grants = {each: grant for each, grant in self._grants.items() if each in unused}

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
