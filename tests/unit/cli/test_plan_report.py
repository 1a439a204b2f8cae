"""What a plan warns of, and how many requests it says fit at once."""

from dataclasses import replace

import pytest

from kvpool.cli.plan_report import PlannedModel, as_json
from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName
from kvpool.core.planning.plan import PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import CrossAttentionSpec, SinkFullAttentionSpec
from kvpool.models.config import ModelOptions
from support.core import STEP, request_of
from support.models import derive

LAYER = FullAttentionSpec(16, 1, 8, "float32")


def test_groups_whose_blocks_have_a_large_common_multiple_are_named() -> None:
    ranks, options = (RankMemory({"l": LAYER}, 2**30),), PlanOptions(9999)
    planned = PlannedModel(derive("llama-3.1-8b"), ranks, options, get_kv_cache_configs(ranks, options), 1)
    assert planned.warnings() == []
    groups = tuple(KVCacheGroup(replace(LAYER, block_size=block_size), ("l",)) for block_size in (1536, 3456))
    (warning,) = replace(planned, plan=replace(planned.plan, groups=groups)).warnings()
    assert "blocks of 1,536, 3,456 tokens" in warning
    assert "multiples of 13,824 tokens only" in warning


def planned_with(layers: dict[str, KVCacheSpec], num_blocks: int = 200, context_parallel_size: int = 1) -> PlannedModel:
    ranks = (RankMemory(layers, 2**40),)
    options = PlanOptions(
        4096,
        auto_fit_max_model_len=True,
        num_blocks_override=num_blocks,
        decode_context_parallel_size=context_parallel_size,
    )
    return PlannedModel(derive("llama-3.1-8b"), ranks, options, get_kv_cache_configs(ranks, options), 1)


def test_the_rank_with_the_largest_blocks_decides_how_many_fit_the_host_memory() -> None:
    ranks = tuple(RankMemory({f"l{i}": layer}, 2**30) for i, layer in enumerate((LAYER, replace(LAYER, head_size=32))))
    options, page_bytes = PlanOptions(1024), 4 * LAYER.page_size_bytes
    plan = get_kv_cache_configs(ranks, options)
    planned = PlannedModel(derive("llama-3.1-8b"), ranks, options, plan, 1, host_memory_bytes=100 * page_bytes + 1)
    figures = as_json(planned)
    blocks, tokens = figures["num_host_blocks"], figures["num_host_tokens"]
    assert (blocks, tokens) == (100, 100 * 1024 // plan.blocks_per_request)
    assert "num_host_blocks" not in as_json(replace(planned, host_memory_bytes=None))
    assert as_json(replace(planned, host_memory_bytes=page_bytes - 1))["num_host_blocks"] == 0


def num_admitted(planned: PlannedModel, num_tokens: int) -> int:
    """Number of requests of this length that a pool of the plan takes."""
    plan, ranks = planned.plan, planned.options.decode_context_parallel_size
    pool = KVCacheManager(
        PoolConfig(
            PoolName("m"),
            plan.num_blocks,
            plan.max_model_len,
            plan.groups,
            enable_caching=False,
            dcp_world_size=ranks,
            allow_too_few_blocks=True,
        )
    )
    num_encoder_tokens = int(any(isinstance(group.spec, CrossAttentionSpec) for group in plan.groups))
    count = 0
    while pool.allocate_slots(
        request_of(pool, "", num_tokens), num_tokens, num_encoder_tokens=num_encoder_tokens, sequence=STEP
    ):
        count += 1
    return count


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-3.1-8b", ModelOptions()),
        ("gemma-3-27b-it", ModelOptions()),
        ("llama-4-scout", ModelOptions()),
        ("deepseek-v3.2", ModelOptions()),
        ("mamba-codestral-7b", ModelOptions(max_model_len=4096)),
        ("jamba-v0.1", ModelOptions(max_model_len=4096)),
        ("qwen3-next-80b-a3b", ModelOptions(max_model_len=4096, num_speculative_tokens=3)),
        ("whisper-large-v3", ModelOptions()),
    ],
)
def test_short_requests_fill_the_pool_at_the_number_that_is_stated(name: str, options: ModelOptions) -> None:
    planned = planned_with(dict(derive(name, options).layers))
    most = planned.max_requests
    assert most
    assert num_admitted(planned, 1) == num_admitted(planned, 12) == most
    assert as_json(planned)["max_requests"] == most


def test_sinks_and_ranks_of_context_parallelism_count() -> None:
    sinks: dict[str, KVCacheSpec] = {"l": SinkFullAttentionSpec(16, 1, 8, "float32", sink_len=64)}
    for ranks, num_sinks in ((1, 4), (2, 2)):
        planned = planned_with(sinks, num_blocks=300, context_parallel_size=ranks)
        assert planned.max_requests == num_admitted(planned, 1) == 299 - num_sinks


def test_a_model_without_a_cache_takes_any_number_of_requests() -> None:
    planned = planned_with({})
    assert planned.max_requests is None
    assert as_json(planned)["max_requests"] is None
