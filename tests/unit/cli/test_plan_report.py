"""What a plan warns of."""

from dataclasses import replace

from kvpool.cli.plan_report import PlannedModel
from kvpool.client import FullAttentionSpec, KVCacheGroup
from kvpool.core.planning.plan import PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
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
