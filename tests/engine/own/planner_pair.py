"""kvpool's planner beside vLLM's, at each plan of vLLM's tests: equal refusals, lengths, blocks, groups and specs.

Tests judge what vLLM's own planner answers. Tensors are not compared: vLLM 0.32 lays them out with strides.
"""

from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from vllm.v1.core import kv_cache_utils

from engine.own import pools
from kvpool.client.vllm.pool_config import spec_of
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.plan import Plan, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import MambaCacheMode

PLANNING: Any = kv_cache_utils
"""The module of vLLM's planner."""
# Before 0.33 the planner is beside the hashes.
with suppress(ImportError):
    PLANNING = import_module("vllm.v1.core.kv_cache_planning")
_theirs: Final = PLANNING.get_kv_cache_configs


def plan_with_both(
    vllm_config: Any, kv_cache_specs: list[dict[str, Any]], available_memory: list[int], *groups: Any
) -> Any:
    """Returns vLLM's plan, or raises its refusal; fails if kvpool's planner differs. 0.33 has groups planned before."""
    pools.note_use(plan_with_both.__name__)
    options = _options(vllm_config)
    ours, refusal = _plan(kv_cache_specs, available_memory, options)
    try:
        theirs = _theirs(vllm_config, kv_cache_specs, available_memory, *groups)
    except ValueError:
        assert refusal, "only vLLM refuses"
        raise
    assert ours, f"only kvpool refuses: {refusal}"
    if options.auto_fit_max_model_len:
        assert ours.max_model_len == vllm_config.model_config.max_model_len
    for own, config in zip(ours.configs, theirs, strict=True):
        assert own.num_blocks == config.num_blocks
        assert [group.layer_names for group in own.groups] == [
            tuple(group.layer_names) for group in config.kv_cache_groups
        ]
        for mine, group in zip(own.groups, config.kv_cache_groups, strict=True):
            assert not group.layer_names or mine.spec == spec_of(group.kv_cache_spec)
    return theirs


def _plan(
    kv_cache_specs: list[dict[str, Any]], available_memory: list[int], options: PlanOptions
) -> tuple[Plan | None, InvalidArgumentError | None]:
    ranks = [
        RankMemory({name: spec_of(spec) for name, spec in specs.items()}, memory)
        for specs, memory in zip(kv_cache_specs, available_memory, strict=True)
    ]
    try:
        return get_kv_cache_configs(ranks, options), None
    except InvalidArgumentError as error:
        return None, error


def _options(vllm_config: Any) -> PlanOptions:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return PlanOptions(
        max_model_len=model.max_model_len,
        auto_fit_max_model_len=getattr(model, "original_max_model_len", None) == -1,
        max_num_batched_tokens=vllm_config.max_in_flight_tokens,
        block_outermost=(vllm_config.cache_config.kv_cache_layout or "").startswith("B"),
        mamba_cache_mode=MambaCacheMode(vllm_config.cache_config.mamba_cache_mode),
        num_blocks_override=vllm_config.cache_config.num_gpu_blocks_override or 0,
        disable_hybrid_kv_cache_manager=bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        prefill_context_parallel_size=parallel.prefill_context_parallel_size,
    )
