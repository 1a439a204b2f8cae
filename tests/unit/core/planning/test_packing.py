"""Blocks that hold the pages of all layers of a group side by side; tests/engine compares them with vLLM's."""

from dataclasses import replace
from typing import Any

from kvpool.core.planning.grouping import layer_specs
from kvpool.core.planning.plan import KVCacheTensor, Plan, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
FULL = FullAttentionSpec(16, **HEADS)  # 8,192 bytes
WINDOW = SlidingWindowSpec(16, **HEADS, sliding_window=64)
LATENT = MLAAttentionSpec(16, head_size=576, dtype="bfloat16")  # 18,432 bytes
INDEX = MLAAttentionSpec(16, head_size=128, dtype="uint8")  # 2,048 bytes
STATE = MambaSpec(16, ((1000,),), ("bfloat16",))  # 2,000 bytes


def plan(**layers: KVCacheSpec) -> Plan:
    return get_kv_cache_configs([RankMemory(layers, 2**24)], PlanOptions(64, block_outermost=True))


def names_of(answer: Plan) -> list[tuple[str, ...]]:
    return [group.layer_names for group in answer.groups]


def test_pages_of_one_size_lie_side_by_side() -> None:
    answer = plan(f0=FULL, f1=FULL, w0=WINDOW, w1=WINDOW, w2=WINDOW)
    assert names_of(answer) == [("f0", "f1"), ("w0", "w2"), ("w1",)]
    page = FULL.page_size_bytes
    assert answer.configs[0].tensors == (
        KVCacheTensor(answer.num_blocks * 2 * page, ("f0", "f1", "w0", "w2", "w1"), (0, page, 0, page, 0)),
    )


def test_layers_of_one_group_follow_each_other_by_spec() -> None:
    answer = plan(a0=LATENT, i0=INDEX, a1=LATENT, i1=INDEX)
    (tensor,) = answer.configs[0].tensors
    assert names_of(answer) == [("a0", "i0", "a1", "i1")]
    assert tensor == KVCacheTensor(
        answer.num_blocks * (2 * 18_432 + 2 * 2_048),
        ("a0", "a1", "i0", "i1"),
        (0, 18_432, 2 * 18_432, 2 * 18_432 + 2_048),
    )


def test_states_share_a_block_as_far_as_they_fit_beside_the_widest_group() -> None:
    states = {f"m{i}": STATE for i in range(10)}
    answer = plan(f=FULL, **states)
    assert [len(names) for names in names_of(answer)] == [1, 4, 3, 3]
    assert answer.configs[0].block_size_bytes == FULL.page_size_bytes
    assert all(spec == STATE for group in answer.groups[1:] for _, spec in layer_specs(group))  # not padded


def test_windows_of_unequal_numbers_are_all_kept() -> None:
    """vLLM 0.32 pairs layers of both sizes where it splits them, and loses those without a partner."""
    wide = replace(WINDOW, num_kv_heads=4)
    answer = plan(f=FULL, w0=WINDOW, w1=wide, w2=WINDOW, w3=WINDOW)
    assert sorted(name for names in names_of(answer) for name in names) == ["f", "w0", "w1", "w2", "w3"]
    assert set(answer.configs[0].tensors[0].shared_by) == {"f", "w0", "w1", "w2", "w3"}
