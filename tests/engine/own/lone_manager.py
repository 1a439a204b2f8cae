"""kvpool's manager with the constructor of vLLM's, for tests that make one without a scheduler."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.interface import PauseState

from engine.own import pools
from engine.own.block_views import BlockPoolView, ShownBlocks, show_blocks
from kvpool.client.transports.transport import WatchKind
from kvpool.client.vllm.events import EventConverter
from kvpool.client.vllm.manager import KVCacheManager
from kvpool.client.vllm.pool_config import pool_config


class LoneManager(KVCacheManager):
    """A manager whose scheduler has no requests, so that nothing is predicted and each call is answered at once."""

    block_pool: BlockPoolView  # type: ignore[assignment]  # which frees deferred blocks, too

    def __init__(self, kv_cache_config: Any, max_model_len: int, **given: Any) -> None:
        """Makes it with the parameters of vLLM's manager."""
        in_flight = given.get("max_in_flight_tokens") or max_model_len
        use_eagle = given.get("use_eagle", False)
        drafter = SimpleNamespace(
            use_eagle=lambda: use_eagle, use_eagle_block_drop=lambda: use_eagle, max_num_new_slots_for_drafting=0
        )
        vllm_config = SimpleNamespace(
            aux_output_config=SimpleNamespace(enabled=False),
            cache_config=SimpleNamespace(
                enable_mamba_shared_prefix_checkpoint=given.get("enable_mamba_shared_prefix_checkpoint", False),
                enable_prefix_caching=given.get("enable_caching", True),
                prefix_caching_hash_algo="sha256",
                prefix_match_unit=None,
            ),
            diffusion_config=None,
            kv_events_config=SimpleNamespace(enable_kv_cache_events=given.get("enable_kv_cache_events", False)),
            max_in_flight_tokens=in_flight,
            model_config=SimpleNamespace(max_model_len=max_model_len),
            num_hash_lookahead_tokens=int(given.get("num_hash_lookahead_tokens", 0)),
            num_prefill_lookahead_tokens=given.get("num_prefill_lookahead", 0),
            observability_config=SimpleNamespace(kv_cache_metrics=given.get("metrics_collector") is not None),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=given.get("dcp_world_size", 1), enable_fault_tolerance=False
            ),
            speculative_config=drafter if use_eagle else None,
        )
        scheduler = SimpleNamespace(
            connector=None,
            ec_connector=None,
            encoder_cache_manager=None,
            encoder_cache_mismatch_reqs=set(),
            is_encoder_decoder=False,
            kv_cache_config=kv_cache_config,
            kv_holding_waiting=[],
            log_stats=given.get("log_stats", False),
            max_model_len=max_model_len,
            max_num_active_reqs=0,
            max_num_encoder_input_tokens=0,
            max_num_scheduled_tokens=in_flight,
            need_mamba_block_aligned_split=False,
            needs_kv_cache_zeroing=False,
            num_lookahead_tokens=0,
            num_prefill_lookahead=0,
            num_sampled_tokens_per_step=1,
            num_waiting_for_streaming_input=0,
            pause_state=PauseState.UNPAUSED,
            prefix_replay_tokens=0,
            running=[],
            scheduler_reserve_full_isl=False,
            scheduler_config=SimpleNamespace(
                enable_chunked_prefill=True,
                long_prefill_token_threshold=0,
                long_prefill_token_threshold_adaptive=False,
                max_num_batched_tokens=in_flight,
                watermark=given.get("watermark", 0.0),
            ),
            use_pp=False,
            vllm_config=vllm_config,
            waiting=[],
        )
        root = getattr(kv_cache_utils, "NONE_HASH", None)  # which the test hashes its requests with
        try:
            config = pool_config(scheduler, pools.new_name())
        finally:
            kv_cache_utils.NONE_HASH = root or kv_cache_utils.NONE_HASH
        super().__init__(pools.open_session(config), scheduler)
        self.max_model_len = max_model_len
        self._converter = EventConverter(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
        self._newest_event = 0
        show_blocks(self)

    def allocate_slots(self, *args: Any, **kwargs: Any) -> Any:
        blocks = super().allocate_slots(*args, **kwargs)
        return blocks and ShownBlocks(blocks, self.block_pool)

    def take_events(self) -> list[Any]:
        self.block_pool.flush()
        newest, taken = self.session.pool().event_sequence, list[Any]()
        if newest > self._newest_event:
            batches = pools.server().client.watch(self.session.config.name, from_sequence=self._newest_event + 1)
            for batch in batches:
                taken += self._converter.convert(batch.events)
                if batch.kind is WatchKind.BATCH and batch.sequence == newest:
                    break
        self._newest_event = newest
        return taken
