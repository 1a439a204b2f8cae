"""What a scheduling round will ask, told from the scheduler's state before it does: so that one message asks all.

1. Only what is sure is foreseen: calls that vLLM's scheduler will make, in its order, with the arguments that it will
   give, as long as each before them is granted. Where one is refused, the service tries none after it.
2. What is foreseen wrongly is undone, so that it costs a message, and never a result: see `StepBatcher`.
"""

from collections.abc import Collection, Iterator
from typing import Any, Final

from vllm.v1.request import Request, RequestStatus

_ADMISSIBLE: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class SchedulePredictor:
    """Reads a scheduler's queues. Changes nothing.

    Attributes:
        most_tokens: Most tokens of a round.
        num_lookahead_tokens: Tokens beyond those of a running request that room is kept for, for drafts.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        config = scheduler.scheduler_config
        vllm_config = scheduler.vllm_config
        self.most_tokens = min(scheduler.max_num_scheduled_tokens, config.max_num_batched_tokens)
        self._long_prefill_tokens = config.long_prefill_token_threshold
        self._max_running = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        self._sampled = getattr(scheduler, "num_sampled_tokens_per_step", 1)
        self.num_lookahead_tokens = scheduler.num_lookahead_tokens
        drafter = vllm_config.speculative_config
        self._is_plain = (
            not getattr(drafter, "max_num_new_slots_for_drafting", 0)
            and getattr(scheduler, "ec_connector", None) is None
            and not getattr(scheduler, "need_mamba_block_aligned_split", False)
            and not getattr(scheduler, "is_encoder_decoder", False)
            and not scheduler.use_pp
            and not getattr(config, "long_prefill_token_threshold_adaptive", False)
        )
        self._foresees_waiting = (
            self._is_plain
            and drafter is None  # whose slots admissions are counted with in ways of their own
            and bool(config.enable_chunked_prefill)
            and scheduler.connector is None  # which is asked between the look-up and the allocation
        )
        self._begins_again = (
            drafter is None and scheduler.connector is None and not getattr(scheduler, "needs_kv_cache_zeroing", False)
        )
        self._is_for_several = hasattr(scheduler, "kv_holding_waiting")  # a lone request is not held back

    def running(
        self, first: int, tokens_left: int, answered: Collection[str]
    ) -> tuple[list[tuple[Request, int]], bool]:
        """The requests from a place on that run and will ask for tokens, and for how many each.

        Args:
            first: Place in the scheduler's list of those that run.
            tokens_left: Tokens that the round has left for them and others.
            answered: Ids of those that were foreseen before, whose tokens are no longer among these.

        Returns:
            They; and whether these are all that will ask.
        """
        if not self._is_plain:
            return [], False
        asking: list[tuple[Request, int]] = []
        scheduler, most = self._scheduler, self.long_prefill_tokens()
        most_tokens = scheduler.max_model_len - self._sampled
        for request in scheduler.running[first:] if first else scheduler.running:
            if tokens_left <= 0:
                break
            if answered and request.request_id in answered:
                continue
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
                continue  # the step in flight is its last
            if request.mm_features:
                return asking, False
            new = len(request._all_token_ids) + placeholders - computed  # noqa: SLF001 - its property takes long
            new += len(request.spec_token_ids)
            if new > 1:
                new = min(new, tokens_left, most_tokens - computed, most or new)
            elif computed >= most_tokens:
                continue
            if new > 0:
                asking.append((request, new))
                tokens_left -= new
        return asking, True

    def can_begin_again(self, *, is_admitting: bool) -> bool:
        """Whether a round in which running requests are foreseen changes nothing before it asks for the first waiting.

        Args:
            is_admitting: Whether the first that waits is foreseen, too.
        """
        scheduler = self._scheduler
        waiting = (
            scheduler.waiting,
            *(getattr(scheduler, name, ()) for name in ("kv_holding_waiting", "skipped_waiting")),
        )
        return self._begins_again and (is_admitting or not any(waiting))

    def long_prefill_tokens(self) -> int:
        """Most tokens of one request in this round; 0 for no limit but the round's."""
        most: int = self._long_prefill_tokens
        if most and self._is_for_several:
            scheduler = self._scheduler
            if len(scheduler.running) + len(scheduler.waiting) + len(scheduler.kv_holding_waiting) <= 1:
                return 0
        return most

    def admissions(self, num_more: int) -> Iterator[Request]:
        """The requests that will be admitted next, at most `num_more`, if tokens and blocks are left for them."""
        scheduler = self._scheduler
        if not self._foresees_waiting or getattr(scheduler, "kv_holding_waiting", None):
            return
        if getattr(getattr(scheduler, "_pause_state", None), "name", "UNPAUSED") != "UNPAUSED":
            return
        room = self._max_running - len(scheduler.running) - getattr(scheduler, "num_waiting_for_streaming_input", 0)
        for request in scheduler.waiting:
            is_usual = (
                request.status in _ADMISSIBLE
                and request.num_computed_tokens == 0
                and not request.lora_request
                and not request.mm_features
                and not request.skip_reading_prefix_cache
                and not getattr(request, "num_stale_output_tokens", 0)
            )
            if not is_usual or num_more <= 0 or room <= 0:
                return
            num_more -= 1
            room -= 1
            yield request
