"""vLLM's schedulers with their blocks from the service, otherwise unchanged."""

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as EngineAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as EngineScheduler
from vllm.v1.request import RequestStatus

from kvpool.client.results import Answer
from kvpool.client.vllm.attach import Attachment, attach, has_own_process
from kvpool.client.vllm.engine_calls import SESSION_ENDED
from kvpool.client.vllm.engine_core import announce_loads, announce_sleep
from kvpool.client.vllm.events import EventForwarder
from kvpool.client.vllm.manager import KVCacheManager, forget_weights
from kvpool.client.vllm.publisher import replaced_publisher
from kvpool.client.vllm.settings import Settings
from kvpool.client.vllm.weights import LoRAs
from kvpool.core.errors import KvpoolError
from kvpool.lending.host_copies import CopyOrders

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
        with replaced_publisher():
            super().__init__(vllm_config, *args, **kwargs)
        self._kvpool_settings = Settings.of_engine(vllm_config)
        shares_prefixes = self._kvpool_settings.shares_memory and vllm_config.cache_config.enable_prefix_caching
        self.kvpool_loras = LoRAs(vllm_config.lora_config) if shares_prefixes else None
        self._attach()
        self._rounds: deque[tuple[Any, int, Mapping[str, int]]] = deque()
        self._is_shut_down = threading.Event()
        if has_own_process() and not self.kv_cache_manager.calls.is_private:
            threading.Thread(target=self._end_when_lost, name="kvpool-session", daemon=True).start()
        if self.kvpool_loras:
            announce_loads()
        if self._kvpool.lender:
            announce_sleep()

    def _attach(self, lost: Attachment | None = None) -> None:
        self._kvpool = attach(self, self._kvpool_settings, lost)
        session, events = self._kvpool.session, None
        if session.config.makes_events and self.enable_kv_cache_events:
            specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
            events = EventForwarder(self._kvpool.client, session.config, specs, self.kv_event_publisher)
        self.kv_cache_manager = KVCacheManager(
            session,
            self,
            events,
            shares_memory=self._kvpool_settings.shares_memory,
            background_copy_mib=self._kvpool_settings.background_copy_mib,
        )

    def _attach_anew(self, error: KvpoolError) -> None:
        """Preempts all running requests, and attaches the private memory of the engine again.

        Steps in flight write before those that follow them.

        Raises:
            KvpoolError: The service refuses the session, or a request that is not running holds blocks.
        """
        fields = {"pool": self._kvpool_settings.pool, "reason": error.reason, "error": str(error)}
        _log.warning("session lost", extra=fields)
        self.kv_cache_manager.keeps_prefixes = True  # of a session that has ended
        super().reset_prefix_cache(reset_running_requests=True)
        if any(each.num_computed_tokens and not each.is_finished() for each in self.requests.values()):
            error.add_note(SESSION_ENDED)
            raise error  # a streaming request waits for input with its blocks
        if self.kv_cache_manager.events:
            self.kv_cache_manager.events.close()
        self._kvpool.client.close()
        self._attach(lost=self._kvpool)
        self._rounds = deque((output, 0, {}) for output, *_ in self._rounds)  # their steps are unknown to the session

    def _end_when_lost(self) -> None:
        """Ends the process of an idle engine whose session has ended; a busy one ends by the error of its next step.

        An idle engine waits for requests in vLLM's code. It would report to be healthy, and fail with the next request.
        """
        while not self._is_shut_down.wait(1.0):
            if self._kvpool.session.has_ended and not self.has_unfinished_requests():
                fields = {"pool": self._kvpool_settings.pool, "error": SESSION_ENDED}
                _log.critical("engine ends: session lost", extra=fields)
                os.kill(os.getpid(), signal.SIGTERM)  # vLLM's API server notices the end of the process
                return

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a scheduling round."""
        calls = self.kv_cache_manager.calls
        if not calls.lost:
            self.kv_cache_manager.batcher.begin()
        if calls.lost:
            self._attach_anew(calls.lost)
            self.kv_cache_manager.batcher.begin()
        output = super().schedule(*args, **kwargs)
        if self._kvpool.lender:  # the workers check it before they run the step
            lease = self._kvpool.session.table_lease
            output.kvpool_lease = (self._kvpool.session.config.name, lease.epoch, lease.session_number)
        loads = self.kv_cache_manager.loads
        self._rounds.append((output, self.kv_cache_manager.batcher.end(), loads.end_round() if loads else {}))
        if orders := self._take_copies(output):
            output.kvpool_copies = orders  # for the workers
        if output.total_num_scheduled_tokens:
            self.kv_cache_manager.calls.check_lease()
        return output

    def add_request(self, request: Any) -> None:
        """Adds a request as vLLM does. In memory that engines share, its hashes cover the weights of its LoRA, too.

        vLLM hashes the name and the path of a LoRA, which other weights can have in another engine, or later.
        """
        if request.lora_request and self.kvpool_loras and request.request_id not in self.requests:
            self.kvpool_load_lora(request.lora_request)
            request.cache_salt = f"{request.cache_salt or ''} {self.kvpool_loras.key(request.lora_request)}"
            request.block_hashes.clear()
            request.append_output_token_ids([])  # hashes the prompt again
        super().add_request(request)

    def kvpool_load_lora(self, lora: Any) -> None:
        """Records a LoRA that vLLM is about to load. Running requests that use its previous weights stop caching."""
        users = (each.lora_request for each in self.requests.values() if each.lora_request)
        is_replaced = self.kvpool_loras and self.kvpool_loras.load(lora)
        if is_replaced and any(each.lora_int_id == lora.lora_int_id for each in users):
            forget_weights(self.kv_cache_manager)

    def _check_loras(self, output: Any) -> None:
        """Checks the LoRAs that vLLM may have loaded for a step, before other sessions see the blocks of the step."""
        loras = [each.lora_request for each in output.scheduled_new_reqs]
        resumed = [self.requests.get(request_id) for request_id in output.scheduled_cached_reqs.resumed_req_ids]
        loras += [each.lora_request for each in resumed if each]
        for lora in {each.lora_int_id: each for each in loras if each}.values():
            if self.kvpool_loras and self.kvpool_loras.has_changed(lora):
                forget_weights(self.kv_cache_manager)

    def kvpool_load_weights(self) -> None:
        """Records that vLLM is about to load other weights, unless the user sets the versions of weights."""
        if not self._kvpool_settings.weights_version:
            forget_weights(self.kv_cache_manager)

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        """Continues a streaming request as vLLM does: what it has put out becomes part of its prompt."""
        super()._update_request_as_session(session, update)
        if session_request := self.kv_cache_manager.calls.requests.get(session.request_id):
            session_request.num_prompt_tokens = session.num_prompt_tokens

    def _try_schedule_encoder_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Schedules encoder inputs as vLLM does; the predictor needs the budget that is left."""
        scheduled = super()._try_schedule_encoder_inputs(*args, **kwargs)
        _, _, budget, *_ = scheduled
        self.kv_cache_manager.batcher.predictor.encoder_inputs.note_scheduled(budget)
        return scheduled

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Returns whether a waiting request can be scheduled, as vLLM does; not while its hit is being copied."""
        promotions = self.kv_cache_manager.calls.promotions
        if request.request_id in promotions.waiting:
            if self.running and promotions.waits(request.request_id):
                return False
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            return True
        if not super()._handle_blocked_waiting_request(request):
            return False
        if not promotions.max_blocks or not self.running:
            return True
        num_active = len(self.running) + self.num_waiting_for_streaming_input + len(promotions.waiting)
        if num_active >= self.max_num_active_reqs and not request.num_computed_tokens:
            return False  # those that wait for copies run first
        hit = self.kv_cache_manager.batcher.promote(request)
        if hit:
            self._await_copies(request, hit)
        return hit is None

    def _await_copies(self, request: Any, hit: Answer) -> None:
        """Has a request wait for the copies of its hit. vLLM skips it, as one that waits for a KV connector."""
        manager = self.kv_cache_manager
        manager.record_prefix_cache_stats(request, hit.num_hit_tokens)
        if manager.events:
            manager.events.publish_hit(request, hit.hit_blocks)
        if request.prefill_stats and not request.num_preemptions:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=hit.num_hit_tokens,
                num_external_cached_tokens=0,
            )
        request.num_computed_tokens = hit.num_hit_tokens
        request.shared_prefix_boundary = hit.shared_prefix_boundary_tokens
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def _take_copies(self, output: Any) -> CopyOrders | None:
        """Returns the copies from and to host memory that go with the output of a round."""
        if not self._kvpool.session.config.num_host_blocks:
            return None
        calls, used, has_tokens = self.kv_cache_manager.calls, set[int](), output.total_num_scheduled_tokens > 0
        if calls.promotions.waiting or calls.promotions.has_unjoined:
            for request_id in (
                *(each.req_id for each in output.scheduled_new_reqs), *output.scheduled_cached_reqs.resumed_req_ids
            ):  # fmt: skip
                calls.promotions.end(request_id)
                used.update(*calls.requests[request_id].block_ids)
            used.update(source for source, _ in output.kv_cache_block_copies or ())
        will_run = self.running and self.get_num_unfinished_requests()  # none of them while paused
        orders = calls.take_host_copies(used, is_idle=not has_tokens and not will_run)
        if not has_tokens and not self.running:
            self._give_up_hits()
        return orders

    def _give_up_hits(self) -> None:
        """Has requests that were admitted for their hits alone wait without blocks, as before."""
        for request_id in reversed([*self.kv_cache_manager.calls.promotions.waiting]):
            request = self.requests[request_id]
            self.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            self.kv_holding_waiting.remove_request(request)
            self.deferred_waiting.discard(request)
            self.waiting.prepend_request(request)

    def has_requests(self) -> bool:
        """Returns whether the engine is to run a step, as vLLM does; also one that joins copies before a pause."""
        return bool(super().has_requests()) or self.kv_cache_manager.calls.promotions.has_unjoined

    def _make_cached_request_data(self, *args: Any, **kwargs: Any) -> Any:
        """Waits for the first answer, then reads the blocks of the round as vLLM does."""
        self.kv_cache_manager.calls.settle()
        return super()._make_cached_request_data(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Handles the outputs of a round as vLLM does; other sessions may hit its blocks from now on."""
        promotions = self.kv_cache_manager.calls.promotions
        promotions.report = getattr(model_runner_output, "kvpool_report", promotions.report)
        if orders := getattr(scheduler_output, "kvpool_copies", None):
            promotions.settle(orders)
        while self._rounds:
            output, sequence, loading = self._rounds.popleft()
            if output is scheduler_output:
                if self.kv_cache_manager.loads:
                    transfers = model_runner_output.kv_connector_output
                    self.kv_cache_manager.loads.settle(loading, transfers.invalid_block_ids if transfers else ())
                if self.kvpool_loras:
                    self._check_loras(scheduler_output)
                # All stages of a pipeline have written the step's blocks: each passes on what it computed from them.
                # Rounds on credit have the number of the round before them: it has run when the last of these has.
                is_shared = bool(self._rounds) and self._rounds[0][1] == sequence
                self.kv_cache_manager.calls.mark_executed(sequence - is_shared, is_newest=not self._rounds)
                break
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._flush_if_idle()
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Ends requests on external request, as vLLM does."""
        # vLLM would keep the blocks of requests that wait for copies. The next step comes after the copies instead.
        self.finished_recving_kv_req_ids.update(self.kv_cache_manager.calls.promotions.waiting)
        ended = super().finish_requests(*args, **kwargs)
        self.finished_recving_kv_req_ids.difference_update(self.kv_cache_manager.calls.promotions.waiting)
        self._flush_if_idle()
        return ended

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Resets the prefix cache as vLLM does. Before a sleep that keeps the weights, it stays as it is."""
        self.kv_cache_manager.keeps_prefixes = self.kvpool_sleep_level == 1
        self.kvpool_sleep_level = 0
        self._give_up_hits()  # the weights may change next, and vLLM preempts only what runs
        return super().reset_prefix_cache(*args, **kwargs)

    def _flush_if_idle(self) -> None:
        """Frees the blocks of ended requests now if no other requests exist; otherwise the next round frees them."""
        if not self.has_unfinished_requests():
            self.kv_cache_manager.calls.deliver_all()
        if not any(self.get_request_counts()):  # not even one that waits with its blocks, or for the end of a pause
            self.kv_cache_manager.calls.give_up_host_copies()

    def shutdown(self) -> None:
        """Ends the session, which frees its blocks; if the service is unavailable, the lease ends it."""
        self._is_shut_down.set()
        if self.kv_cache_manager.events:
            self.kv_cache_manager.events.close()
        super().shutdown()
        session, calls = self.kv_cache_manager.session, self.kv_cache_manager.calls
        _log.info(
            "engine detached",
            extra={
                "pool": session.config.name,
                "session": session.session_number,
                "rounds": self.kv_cache_manager.batcher.num_rounds,
                "waits_admission": calls.waits["admission"],
                "waits_decode": calls.waits["decode"],
                "waits_background": calls.waits["background"],
                "copies_beside": calls.promotions.num_copies,
            },
        )
        try:
            if not calls.has_failed:  # otherwise closing would wait for the service again
                session.close()
        except KvpoolError as error:
            fields = {"pool": session.config.name, "reason": error.reason, "error": str(error)}
            _log.warning("session not closed", extra=fields)
        if self._kvpool.lender:
            self._kvpool.lender.close()
        self._kvpool.client.close()


class AsyncScheduler(Scheduler, EngineAsyncScheduler):  # type: ignore[misc]  # vLLM has no types here
    """The scheduler for an engine that schedules a step ahead of its outputs."""
