"""Drives vLLM's scheduler without a model: tokens are generated, equal for both schedulers.

Schedulers of one process can be compared so step by step, in milliseconds each, and over kinds of groups that no small
model has. Works with any version of vLLM that can be imported, whether its engine runs here or not.
"""

import json
import math
import random
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 512,
    "max_position_embeddings": 131072, "torch_dtype": "float32",
}  # fmt: skip


STATES = -1
LOOKUPS = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")


@dataclass(frozen=True)
class Setup:
    """What a scheduler is made with, beside its class.

    Attributes:
        windows: A group each: 0 for full attention, STATES for states, else a sliding window in tokens.
        block_sizes: Tokens of the blocks of each group; empty for `block_size` in all.
        match_unit: Tokens that a hash covers, vLLM's prefix_match_unit; 0 for `block_size`.
        retention_tokens: vLLM's prefix_cache_retention_interval, where it has one.
        replays: Whether windows take no part in hits, of whose end as many tokens are computed again.
        exports_states: Whether kernels write states within a step.
        num_stages: Stages of a pipeline: as many steps are in flight at once, with `is_async` one more.
        num_drafts: Tokens that are drafted after each step, some of them right.
        uses_eagle: Whether the drafter has a KV cache of its own, which room is kept for.
        draft_groups: With `uses_eagle`, the groups with layers of the drafter; empty if vLLM cannot tell.
        has_modules: With `uses_eagle`, whether the drafter has a module for each draft, and reads as many tokens ahead.
        hashes_ahead: With `uses_eagle`, whether a block's hash covers the token after it, where vLLM can do so.
        load_failures: Beside the connector of connector.py, what becomes of requests whose loads fail; none if empty.
        encoder_budget: Embeddings of images that a step may compute, and that the encoder cache holds; no images if 0.
        splits_images: Whether a step may end within an image.
        events_endpoint: Where block events are published, and their replay with ".replay"; nowhere if empty.
    """

    num_blocks: int = 64
    block_size: int = 16
    windows: tuple[int, ...] = (0,)
    block_sizes: tuple[int, ...] = ()
    match_unit: int = 0
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    max_model_len: int = 1024
    policy: str = "fcfs"
    is_async: bool = False
    num_stages: int = 1
    enable_caching: bool = True
    long_prefill_tokens: int = 0
    watermark: float = 0.0
    prefill_interval: int = 1
    reserves_sequence: bool = True
    retention_tokens: int | None = 0
    hash_algorithm: str = "sha256"
    replays: bool = False
    exports_states: bool = False
    num_drafts: int = 0
    uses_eagle: bool = False
    draft_groups: tuple[int, ...] = ()
    has_modules: bool = False
    hashes_ahead: bool = False
    load_failures: str = ""
    encoder_budget: int = 0
    splits_images: bool = True
    events_endpoint: str = ""
    additional_config: dict[str, Any] = field(default_factory=dict, hash=False)
    worker_cls: str = "auto"


def _known(kind: Any, **values: Any) -> Any:
    """Makes a configuration with those of the values that this version has."""
    names = {f.name for f in kind.__dataclass_fields__.values()}
    return kind(**{name: value for name, value in values.items() if name in names})


_schedulers: list[Any] = []


def _exact(additional_config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with blocks taken in vLLM's order, unless it says how many slots are held in reserve."""
    kvpool = additional_config.get("kvpool")
    return additional_config if kvpool is None else {"kvpool": {"reserve_tokens": 0, **kvpool}}


def make_scheduler(scheduler_class: Any, setup: Setup, folder: Path) -> Any:
    """Makes a scheduler of a class, with the groups of a setup."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    model_config = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=setup.max_model_len, seed=0
    )
    scheduler_config = _known(
        SchedulerConfig,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        max_model_len=setup.max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        policy=setup.policy,
        async_scheduling=setup.is_async and setup.num_stages == 1,
        long_prefill_token_threshold=setup.long_prefill_tokens,
        watermark=setup.watermark,
        prefill_schedule_interval=setup.prefill_interval,
        scheduler_reserve_full_isl=setup.reserves_sequence,
        disable_chunked_mm_input=not setup.splits_images,
        disable_hybrid_kv_cache_manager=True if setup.load_failures else None,
    )
    cache_config = _known(
        CacheConfig,
        block_size=setup.block_size,
        gpu_memory_utilization=0.9,
        swap_space=0,
        cache_dtype="auto",
        enable_prefix_caching=setup.enable_caching,
        prefix_caching_hash_algo=setup.hash_algorithm,
        prefix_cache_retention_interval=setup.retention_tokens,
        prefix_match_unit=setup.match_unit or None,
        mamba_cache_mode="align" if STATES in setup.windows else "none",
    )
    vllm_config = VllmConfig(
        scheduler_config=scheduler_config,
        model_config=model_config,
        cache_config=cache_config,
        speculative_config=_drafts(setup, model_config) if setup.num_drafts else None,
        kv_events_config=_events(setup.events_endpoint) if setup.events_endpoint else None,
        kv_transfer_config=_transfer(setup.load_failures) if setup.load_failures else None,
        additional_config=_exact(setup.additional_config),
        parallel_config=ParallelConfig(worker_cls=setup.worker_cls, pipeline_parallel_size=setup.num_stages),
    )
    vllm_config.scheduler_config.async_scheduling = (
        setup.is_async
    )  # which the platform may turn off, and refuse with stages
    vllm_config.cache_config.num_gpu_blocks = setup.num_blocks
    scheduler = scheduler_class(
        vllm_config=vllm_config,
        kv_cache_config=_kv_cache_config(setup),
        structured_output_manager=StructuredOutputManager(vllm_config),
        log_stats=True,
        **_block_sizes(setup),
    )
    states = [size for window, size in zip(setup.windows, setup.block_sizes, strict=False) if window == STATES]
    if states:
        # vLLM's engine sets the smallest block of all groups here. Then steps begin within blocks of states and pass
        # their ends, and vLLM's manager, but not the pool, caches states that were written after fewer tokens.
        scheduler.cache_config.block_size = math.lcm(*states)
    if setup.encoder_budget:  # which vLLM derives from models that take images
        scheduler.max_num_encoder_input_tokens = setup.encoder_budget
        scheduler.encoder_cache_manager = EncoderCacheManager(setup.encoder_budget)
    _schedulers.append(scheduler)
    return scheduler


def end_sessions() -> None:
    """Ends those of the schedulers that were made since the last call, if they have any."""
    while _schedulers:
        scheduler = _schedulers.pop()
        if hasattr(scheduler, "_is_shut_down") and not scheduler._is_shut_down.is_set():
            scheduler.shutdown()


def _block_sizes(setup: Setup) -> dict[str, int]:
    """Arguments for the tokens of a hit and of a hash."""
    sizes = setup.block_sizes or (setup.block_size,)
    return {"block_size": math.lcm(*sizes), "hash_block_size": setup.match_unit or math.gcd(*sizes)}


def _drafts(setup: Setup, model_config: ModelConfig) -> SpeculativeConfig:
    config = _known(
        SpeculativeConfig,
        method="ngram",
        num_speculative_tokens=setup.num_drafts,
        prompt_lookup_max=2,
        prompt_lookup_min=1,
        target_model_config=model_config,
        target_parallel_config=ParallelConfig(),
        disable_lookahead_block_hashes=not setup.hashes_ahead,
    )
    if setup.uses_eagle:  # which would need a model of its own
        for name in ("use_eagle", "needs_eagle_block_drop", "use_eagle_block_drop"):
            object.__setattr__(config, name, lambda: True)
        object.__setattr__(config, "use_multi_module_mtp", lambda: setup.has_modules)
    return config


def _transfer(failures: str) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="ScriptedConnector",
        kv_connector_module_path="engine.connector",
        kv_role="kv_both",
        kv_load_failure_policy=failures,
    )


def _events(endpoint: str) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=f"{endpoint}.replay"
    )


def _kv_cache_config(setup: Setup) -> Any:
    common = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    groups = []
    sizes = setup.block_sizes or (setup.block_size,) * len(setup.windows)
    for i, (window, size) in enumerate(zip(setup.windows, sizes, strict=True)):
        if window == STATES:
            spec = kv_cache_interface.MambaSpec(
                block_size=size,
                shapes=((16,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_speculative_blocks=setup.num_drafts,
                num_prefill_checkpoint_blocks=int(setup.exports_states),
                prefill_checkpoint_alignment=1 if setup.exports_states else None,
            )
            groups.append(kv_cache_interface.KVCacheGroupSpec([f"layer{i}"], spec))
            continue
        if not window:
            spec = kv_cache_interface.FullAttentionSpec(**common, block_size=size)
        elif setup.replays:
            latent = {**common, "num_kv_heads": 1, "block_size": size, "sliding_window": window}
            spec = kv_cache_interface.SlidingWindowMLASpec(**latent, bounded_replay=True)
        else:
            spec = kv_cache_interface.SlidingWindowSpec(**common, block_size=size, sliding_window=window)
        groups.append(kv_cache_interface.KVCacheGroupSpec([f"layer{i}"], spec))
    for i in setup.draft_groups:
        groups[i].is_eagle_group = True
    return _known(
        kv_cache_interface.KVCacheConfig,
        num_blocks=setup.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=setup.retention_tokens,
    )


class Driver:
    """Puts requests into a scheduler and runs its steps, each token a function of its request and place."""

    def __init__(self, scheduler: Any, setup: Setup) -> None:
        self.scheduler = scheduler
        self._lag = setup.num_stages - 1 + setup.is_async
        self._num_drafts = setup.num_drafts
        self._outputs: deque[Any] = deque()
        self._hasher = None
        if setup.enable_caching or scheduler.connector is not None:  # as EngineCore
            function = get_hash_fn_by_name(setup.hash_algorithm)
            init_none_hash(function)
            unit, ahead = setup.match_unit or setup.block_size, getattr(scheduler, "num_hash_lookahead_tokens", 0)
            self._hasher = get_request_block_hasher(unit, function, *([ahead] if ahead else []))
        self.cached: dict[str, int] = {}
        self.generated: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.lookups = dict.fromkeys(LOOKUPS, 0)
        self.report: Any = None  # what outputs say of copies from and to host memory

    def add(self, request_id: str, prompt: list[int], max_tokens: int, **values: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **values.pop("sampling", {}))
        params.update_from_generation_config({}, 2)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(len(self.requests)),
            block_hasher=self._hasher,
            **values,
        )
        if request_id in self.requests:  # it continues: its outputs become part of its prompt
            self.generated[request_id] = []
        self.requests.setdefault(request_id, request)
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> dict[str, Any]:
        """Runs a step; returns what was scheduled, to be compared."""
        return describe(self.run_step())

    def run_step(self) -> Any:
        """Runs a step; returns the scheduler's output for it."""
        scheduled = self.scheduler.schedule()
        self._outputs.append(scheduled)
        if len(self._outputs) > self._lag:
            self.settle()
        return scheduled

    def timed_step(self) -> tuple[float, float]:
        """Runs a step; returns the seconds that the scheduler took to schedule it, and to take its outputs."""
        started = time.perf_counter()
        scheduled = self.scheduler.schedule()
        took = time.perf_counter() - started
        self._outputs.append(scheduled)
        return took, self.settle() if len(self._outputs) > self._lag else 0.0

    def settle(self) -> float:
        """Takes the outputs of the oldest step that has none; returns the seconds that the scheduler took."""
        scheduled = self._outputs.popleft()
        ids = list(scheduled.num_scheduled_tokens)
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        self.cached.update(starts)
        again = scheduled.scheduled_cached_reqs
        starts.update(zip(again.req_ids, again.num_computed_tokens, strict=True))
        sampled = [self._sample(request_id, starts[request_id], scheduled) for request_id in ids]
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={request_id: i for i, request_id in enumerate(ids)}, sampled_token_ids=sampled
        )
        if self.scheduler.connector is not None:
            output.kv_connector_output = self.scheduler.connector.take_output(set(ids))
        if self.report:
            output.kvpool_report = self.report
        started = time.perf_counter()
        outputs = self.scheduler.update_from_output(scheduled, output)
        took = time.perf_counter() - started
        if self._num_drafts:
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [self._draft(request_id) for request_id in ids]))
        for client in outputs.values():
            for each in client.outputs:
                self.generated.setdefault(each.request_id, []).extend(each.new_token_ids)
            if client.scheduler_stats:
                stats = client.scheduler_stats.prefix_cache_stats
                for name in self.lookups:
                    self.lookups[name] += getattr(stats, name)
        return took

    def _sample(self, request_id: str, num_computed_tokens: int, scheduled: Any) -> list[int]:
        drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
        end = num_computed_tokens + scheduled.num_scheduled_tokens[request_id] - len(drafts)
        # What is known by then: what was put out already, and is yet to come.
        if end < self.requests[request_id].num_prompt_tokens + len(self.generated.get(request_id, ())):
            return []
        tokens = [token_at(request_id, end)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            tokens.append(token_at(request_id, end + len(tokens)))
        return tokens

    def _draft(self, request_id: str) -> list[int]:
        """Drafts what comes next, more or less: two in three are right."""
        end = self.requests[request_id].num_tokens
        places = range(end, end + self._num_drafts)
        return [
            token_at(request_id, place) ^ (zlib.crc32(f"draft {request_id} {place}".encode()) % 3 == 0)
            for place in places
        ]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to schedule."""
        return not self.scheduler.has_unfinished_requests()

    def finish(self) -> None:
        """Runs steps until nothing is left to schedule."""
        while not self.is_idle:
            self.step()

    def drain(self) -> None:
        while self._outputs:
            self.settle()


def token_at(request_id: str, place: int) -> int:
    """The token that a request generates at a place after its prompt."""
    return zlib.crc32(f"{request_id} {place}".encode()) % 8


def images(prompt: list[int], names: str = "image") -> list[MultiModalFeatureSpec]:
    """Images in a prompt, of 8 to 50 tokens: the same in all prompts with the same first token and names."""
    rng = random.Random(prompt[0])
    found: list[MultiModalFeatureSpec] = []
    start = rng.randrange(40)
    while True:
        kind = rng.randrange(8)
        position = PlaceholderRange(offset=start, length=8 + 6 * kind)
        start += position.length + rng.randrange(40)
        if position.offset + position.length > len(prompt):
            return found
        found.append(
            MultiModalFeatureSpec(data=None, modality="image", identifier=f"{names}{kind}", mm_position=position)
        )


def describe(scheduled: Any) -> dict[str, Any]:
    """What a step scheduled: requests, tokens, blocks, in their order."""
    cached = scheduled.scheduled_cached_reqs
    return {
        "tokens": list(scheduled.num_scheduled_tokens.items()),
        "drafts": scheduled.scheduled_spec_decode_tokens,
        "new": [(r.req_id, r.num_computed_tokens, r.block_ids) for r in scheduled.scheduled_new_reqs],
        "cached": list(zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)),
        "resumed": sorted(cached.resumed_req_ids),
        "preempted": sorted(scheduled.preempted_req_ids or ()),
        "finished": sorted(scheduled.finished_req_ids),
        "copies": [tuple(each) for each in scheduled.kv_cache_block_copies or ()],
        "encoded": scheduled.scheduled_encoder_inputs,
        "encodings_freed": scheduled.free_encoder_mm_hashes,
    }
