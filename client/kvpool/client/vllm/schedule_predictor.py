"""Predicts the allocations of a scheduling round from the scheduler's state, so that one message can carry them all.

A round is one call of the scheduler's `schedule`.

1. Only certain calls are predicted: calls that vLLM's scheduler will make, in its order and with its arguments, if each
   call before them is granted. After a refused call the service skips the rest.
   vLLM's scheduler asks once per running request; one message per call would take longer than the engine's step. A
   modified copy of its loop would have to follow each version. The next step is not requested ahead: a request that
   ends would hold a block that vLLM would not have allocated.
2. A wrong prediction is undone. It costs a message but never changes a result: see `StepBatcher`.
"""

from collections.abc import Collection
from itertools import islice
from typing import Any, Final

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from kvpool.client.vllm.encoder_inputs import EncoderInputs, needs_encoder, num_embeds

_ADMISSIBLE: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class SchedulePredictor:
    """Reads the queues of a scheduler without changing them.

    Attributes:
        max_tokens: Maximum number of tokens of a round.
        num_lookahead_tokens: Extra tokens per running request to allocate slots for, for drafts.
        encoder_inputs: Encoder inputs of the round.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        config = scheduler.scheduler_config
        self.max_tokens = min(scheduler.max_num_scheduled_tokens, config.max_num_batched_tokens)
        self._long_prefill_tokens = config.long_prefill_token_threshold
        self._max_running = scheduler.max_num_active_reqs
        self._sampled = scheduler.num_sampled_tokens_per_step
        self.num_lookahead_tokens = scheduler.num_lookahead_tokens
        self.encoder_inputs = EncoderInputs(scheduler)
        drafter = scheduler.vllm_config.speculative_config
        self._splits_at_states = bool(scheduler.need_mamba_block_aligned_split)
        self._reserves_lookahead = scheduler.num_prefill_lookahead > 1
        self._is_plain = (
            not getattr(drafter, "max_num_new_slots_for_drafting", 0)
            and scheduler.ec_connector is None
            and not scheduler.is_encoder_decoder
            and not scheduler.use_pp
            and not config.long_prefill_token_threshold_adaptive
            and getattr(scheduler, "local_prefill_interval", 1) == 1  # since 0.33
        )
        self._predicts_admissions = (
            self._is_plain
            and drafter is None  # admissions count the slots of a drafter differently
            and bool(config.enable_chunked_prefill)
            and not self._splits_at_states  # the hit determines where an admission ends
            and scheduler.connector is None  # it is called between look-up and allocation
            and not scheduler.prefix_replay_tokens  # of a hit, some tokens are computed again
        )

    def begin_round(self) -> None:
        """Forgets the encoder inputs of the round before."""
        self.encoder_inputs = EncoderInputs(self._scheduler)

    def running(  # noqa: C901 - a call per request would take longer than the rest of the loop
        self, first: int, tokens_left: int, answered: Collection[str]
    ) -> tuple[list[tuple[Request, int]], bool]:
        """Predicts which running requests will allocate tokens, and how many.

        Args:
            first: Index of the first request in the scheduler's list of running requests.
            tokens_left: Tokens left in the round.
            answered: Ids of requests predicted earlier, whose tokens are already subtracted from `tokens_left`.

        Returns:
            The requests with their numbers of tokens; and whether these are all that will allocate.
        """
        allocating: list[tuple[Request, int]] = []
        can_encode = self.encoder_inputs.is_supported and not first and not answered
        scheduler, limit = self._scheduler, self.long_prefill_tokens()
        max_tokens = scheduler.max_model_len - self._sampled
        for request in scheduler.running[first:] if self._is_plain else ():
            if tokens_left <= 0:
                break
            if answered and request.request_id in answered:
                continue
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
                continue  # the step in flight is its last
            new = len(request._all_token_ids) + placeholders - computed  # noqa: SLF001 - the property is slow
            new += len(request.spec_token_ids)
            if new > 1:
                new = min(new, tokens_left, max_tokens - computed, limit or new)
            elif computed >= max_tokens:
                continue
            if self._splits_at_states and new > 0:
                new = scheduler._mamba_block_aligned_split(request, new)  # noqa: SLF001 - changes nothing
            if request.mm_features and new > 0 and needs_encoder(request):
                if not can_encode:
                    return allocating, False
                new = self.encoder_inputs.schedule(request, new)
            if self._reserves_lookahead and new > 0:
                new = scheduler._reserve_prefill_lookahead(request, computed, new)  # noqa: SLF001 - changes nothing
            if new > 0:
                allocating.append((request, new))
                tokens_left -= new
        return allocating, self._is_plain

    def long_prefill_tokens(self) -> int:
        """Maximum number of tokens of one request in this round; 0 for only the limit of the round."""
        limit: int = self._long_prefill_tokens
        scheduler = self._scheduler
        if limit and len(scheduler.running) + len(scheduler.waiting) + len(scheduler.kv_holding_waiting) <= 1:
            return 0  # it does not apply to a single request
        return limit

    def admissions(self, max_admissions: int) -> list[Request]:
        """Predicts the next admissions, at most `max_admissions`, if tokens and blocks are left for them."""
        scheduler = self._scheduler
        if not self._predicts_admissions:
            return []
        promotions = scheduler.kv_cache_manager.calls.promotions
        if not all(scheduler.running and promotions.waits(each.request_id) for each in scheduler.kv_holding_waiting):
            return []  # it schedules those first
        if scheduler.pause_state is not PauseState.UNPAUSED:
            return []
        num_running = len(scheduler.running) + scheduler.num_waiting_for_streaming_input + len(promotions.waiting)
        limit = max(min(max_admissions, self._max_running - num_running), 0)
        predicted: list[Request] = []
        num_embeds_left = self.encoder_inputs.num_embeds_left
        for request in islice(scheduler.waiting, limit):
            if not is_admissible(request):
                break
            if request.mm_features:
                num_embeds_left -= num_embeds(request)  # whatever it hits, it needs no more
                if num_embeds_left < 0:
                    break
            predicted.append(request)
        return predicted


def is_admissible(request: Request) -> bool:
    """Whether the admission of a waiting request is a plain look-up and allocation."""
    return (
        request.status in _ADMISSIBLE
        and request.num_computed_tokens == 0
        and not request.lora_request
        and not request.skip_reading_prefix_cache
        and not request.num_stale_output_tokens
    )
