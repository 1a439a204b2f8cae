"""Predicts the encoder inputs (images, audio) of a scheduling round without changing vLLM's encoder cache.

vLLM schedules a token only if the encoder inputs before it fit the round's compute budget and the encoder cache. Its
own method is called with a copy of the cache: rules of our own would differ between versions, and the cache itself
cannot be restored, because it evicts. While such requests asked one by one, rounds took 9 to 12 times vLLM's time; now
they take twice.
"""

from copy import copy
from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class EncoderInputs:
    """The encoder inputs of one round.

    Attributes:
        is_supported: Whether predictions are possible: an encoder cache of another class has rules of its own.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._budget: int = scheduler.max_num_encoder_input_tokens
        self._ahead: _SchedulerAhead | None = None
        self.is_supported = type(scheduler.encoder_cache_manager) is EncoderCacheManager

    @property
    def is_changed(self) -> bool:
        """Whether predicted requests will have changed the encoder cache."""
        return self._ahead is not None

    @property
    def num_embeds_left(self) -> int:
        """Number of embeddings that fit the round for certain, after the requests that were predicted or scheduled."""
        if not self.is_supported or self._scheduler.scheduler_config.disable_chunked_mm_input:
            return 0
        manager = (self._ahead or self._scheduler).encoder_cache_manager
        return min(self._budget, int(manager.num_freeable_slots))

    def schedule(self, request: Request, num_new_tokens: int) -> int:
        """Predicts how many of the new tokens of a running request vLLM schedules, and takes their encoder inputs."""
        if self._ahead is None:
            self._ahead = _SchedulerAhead(self._scheduler)
        inputs, num_tokens, budget, *_ = Scheduler._try_schedule_encoder_inputs(  # noqa: SLF001 - its rules, not a copy
            self._ahead,
            request,
            request.num_computed_tokens,
            num_new_tokens,
            self._budget,
            shift_computed_tokens=self._scheduler.num_prefill_lookahead,
        )
        if num_tokens:
            self._budget = budget
            for input_id in inputs:
                self._ahead.encoder_cache_manager.allocate(request, input_id)
        return int(num_tokens)

    def note_scheduled(self, budget: int) -> None:
        """Records the compute budget that is left after a request that the scheduler itself has reached."""
        self._budget = budget
        self._ahead = None


class _SchedulerAhead:
    """A scheduler with a copy of its encoder cache, for `_try_schedule_encoder_inputs`."""

    def __init__(self, scheduler: Any) -> None:
        manager = copy(scheduler.encoder_cache_manager)
        manager.cached = {each: set(request_ids) for each, request_ids in manager.cached.items()}
        manager.freeable = manager.freeable.copy()
        manager.freed = []
        manager.request_cached_ids = {}  # read only where inputs are freed
        manager.request_hash_refs = {}  # since 0.33; counts these
        manager.num_embeds_by_hash = manager.num_embeds_by_hash.copy()
        self.encoder_cache_manager = manager
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    @staticmethod
    def _reject_on_encoder_cache_embed_mismatch(_: Request, __: int, ___: str, cached: int, requested: int) -> bool:
        """Answers as the scheduler, which also fails the request."""
        return cached != requested


def needs_encoder(request: Request) -> bool:
    """Whether a request with encoder inputs has tokens of them that are not computed yet."""
    last = request.mm_features[-1].mm_position
    return bool(request.num_computed_tokens < last.offset + last.length)


def num_embeds(request: Request) -> int:
    """Number of embeddings of all encoder inputs of a request."""
    return sum(map(request.get_num_encoder_embeds, range(len(request.mm_features))))
