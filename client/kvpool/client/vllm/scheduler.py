"""vLLM's schedulers with their blocks from the service, otherwise unchanged."""

import logging
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as EngineAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as EngineScheduler

from kvpool.client.vllm.attach import attach
from kvpool.client.vllm.events import EventForwarder
from kvpool.client.vllm.manager import KVCacheManager
from kvpool.client.vllm.settings import Settings
from kvpool.client.vllm.step_batcher import RefusedError
from kvpool.core.errors import KvpoolError

_log = logging.getLogger("kvpool.client.vllm")


class Scheduler(EngineScheduler):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's scheduler on a pool of the service; `AsyncScheduler` if the engine schedules a step ahead."""

    kv_cache_manager: KVCacheManager
    kvpool_sleep_level = 0
    """Level of the sleep for which the engine core will reset the prefix cache, in lent memory; 0 for none."""

    def __new__(cls, vllm_config: Any, *_: object, **__: object) -> Self:
        """Makes the scheduler class that the engine is configured for."""
        is_async = cls is Scheduler and vllm_config.scheduler_config.async_scheduling
        return super().__new__(AsyncScheduler if is_async else cls)  # type: ignore[no-any-return]

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Makes vLLM's scheduler, creates the pool, and opens a session in it.

        Raises:
            ValueError: The settings are invalid, or the engine uses a feature that the service does not support.
            KvpoolError: The service refuses the pool or the session, or is unavailable.
        """
        super().__init__(vllm_config, *args, **kwargs)
        settings = Settings.of_engine(vllm_config)
        self._kvpool = attach(self, settings)
        session, events = self._kvpool.session, None
        if session.config.makes_events and self.enable_kv_cache_events:
            specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
            events = EventForwarder(self._kvpool.client, session.config, specs, self.kv_event_publisher)
        shares_memory = bool(settings.memory or settings.memory_id)
        self.kv_cache_manager = KVCacheManager(session, self, events, shares_memory=shares_memory)
        self._rounds: deque[tuple[Any, int, Mapping[str, int]]] = deque()
        if self._kvpool.lender:
            from kvpool.client.vllm.sleep import announce_sleep  # noqa: PLC0415 - of vLLM versions with lent memory

            announce_sleep()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a scheduling round, with one restart if a grant was refused."""
        self.kv_cache_manager.batcher.begin()
        try:
            output = super().schedule(*args, **kwargs)
        except RefusedError:  # raised before the round changed any state
            output = super().schedule(*args, **kwargs)
        if self._kvpool.lender:  # the workers check it before they run the step
            lease = self._kvpool.session.table_lease
            output.kvpool_lease = (self._kvpool.session.config.name, lease.epoch, lease.session_number)
        loads = self.kv_cache_manager.loads
        self._rounds.append((output, self.kv_cache_manager.batcher.end(), loads.end_round() if loads else {}))
        if output.total_num_scheduled_tokens:
            self.kv_cache_manager.batcher.check_lease()
        return output

    def _try_schedule_encoder_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Schedules encoder inputs as vLLM does; the predictor needs the budget that is left."""
        scheduled = super()._try_schedule_encoder_inputs(*args, **kwargs)
        _, _, budget, *_ = scheduled
        self.kv_cache_manager.batcher.predictor.encoder_inputs.note_scheduled(budget)
        return scheduled

    def _make_cached_request_data(self, *args: Any, **kwargs: Any) -> Any:
        """Waits for the first answer, then reads the blocks of the round as vLLM does."""
        self.kv_cache_manager.batcher.settle()
        return super()._make_cached_request_data(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Handles the outputs of a round as vLLM does; other sessions may hit its blocks from now on."""
        while self._rounds:
            output, sequence, loading = self._rounds.popleft()
            if output is scheduler_output:
                if self.kv_cache_manager.loads:
                    transfers = model_runner_output.kv_connector_output
                    self.kv_cache_manager.loads.settle(loading, transfers.invalid_block_ids if transfers else ())
                # All stages of a pipeline have written the step's blocks: each passes on what it computed from them.
                self.kv_cache_manager.batcher.mark_executed(sequence, is_newest=not self._rounds)
                break
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._flush_if_idle()
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Ends requests on external request, as vLLM does."""
        ended = super().finish_requests(*args, **kwargs)
        self._flush_if_idle()
        return ended

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Resets the prefix cache as vLLM does. Before a sleep in lent memory, the cached prefixes stay in the pool.

        After a sleep that discards the weights, the engine may load others: until an operator states their version, it
        hits only what it computes from then on.
        """
        level, self.kvpool_sleep_level = self.kvpool_sleep_level, 0
        manager = self.kv_cache_manager
        manager.keeps_prefixes = level > 0
        try:
            is_reset = super().reset_prefix_cache(*args, **kwargs)
        finally:
            manager.keeps_prefixes = False
        if level > 1:  # the weights go
            manager.session.set_weights_version(f"unknown-{uuid.uuid4().hex}")
        return is_reset

    def _flush_if_idle(self) -> None:
        """Frees the blocks of ended requests now if no other requests exist; otherwise the next round frees them."""
        if not self.has_unfinished_requests():
            self.kv_cache_manager.batcher.flush()

    def shutdown(self) -> None:
        """Ends the session, which frees its blocks; if the service is unavailable, the lease ends it."""
        if self.kv_cache_manager.events:
            self.kv_cache_manager.events.close()
        super().shutdown()
        session = self.kv_cache_manager.session
        try:
            if not self.kv_cache_manager.batcher.has_failed:  # otherwise closing would wait for the service again
                session.close()
                if self._kvpool.watcher:
                    self._kvpool.watcher.dismiss()
        except KvpoolError as error:
            fields = {"pool": session.config.name, "reason": error.reason, "error": str(error)}
            _log.warning("session not closed", extra=fields)
        if self._kvpool.lender:
            self._kvpool.lender.close()
        self._kvpool.client.close()


class AsyncScheduler(Scheduler, EngineAsyncScheduler):  # type: ignore[misc]  # vLLM has no types here
    """The scheduler for an engine that schedules a step ahead of its outputs."""
