"""Plans beyond the golden files: uneven stages, padded pages, and every error."""

from typing import Any

import pytest

from kvpool.core.planning.plan import Plan, PlanError, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from support.refusals import refused

GIB = 2**30
HEADS: dict[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
FULL = FullAttentionSpec(16, **HEADS)  # 64 KiB
WINDOW = SlidingWindowSpec(16, **HEADS, sliding_window=1024)
STATE = MambaSpec(16, ((3, 5000),), ("bfloat16",))  # 30,000 bytes


def rank(gib: float, **layers: KVCacheSpec) -> RankMemory:
    return RankMemory(layers, int(gib * GIB))


def plan(*ranks: RankMemory, max_model_len: int = 8192, **options: Any) -> Plan:
    return get_kv_cache_configs(ranks, PlanOptions(max_model_len, **options))


def test_a_stage_without_layers_takes_no_memory_and_bounds_nothing() -> None:
    answer = plan(rank(1, a=FULL), rank(0))
    assert [config.num_blocks for config in answer.configs] == [GIB // 65_536] * 2
    assert [len(config.tensors) for config in answer.configs] == [1, 0]
    assert answer.configs[1].groups[0].layer_names == ()


def test_a_model_without_a_cache_has_one_block_and_no_limit() -> None:
    answer = plan(rank(0))
    assert (answer.groups, answer.configs[0].tensors, answer.num_blocks) == ((), (), 1)
    assert (answer.max_concurrency, answer.longest_request_tokens) == (float("inf"), 8192)


def test_encoder_only_layers_are_in_no_group() -> None:
    answer = plan(rank(1, encoder=EncoderOnlyAttentionSpec(16, **HEADS), cross=CrossAttentionSpec(16, **HEADS)))
    assert [group.layer_names for group in answer.groups] == [("cross",)]
    assert answer.blocks_per_request == 94


def test_groups_with_fewer_layers_are_padded_and_the_padding_is_reported() -> None:
    layers = {f"w{i}": WINDOW for i in range(3)} | {f"f{i}": FULL for i in range(2)}
    (config,) = plan(rank(1, **layers)).configs
    assert [group.layer_names for group in config.groups] == [("w0", "w2"), ("w1",), ("f0", "f1")]
    assert config.padding_bytes_per_block == (0, 65_536, 0)
    assert [tensor.shared_by for tensor in config.tensors] == [("w0", "w1", "f0"), ("w2", "f1")]


def test_every_rank_gets_the_blocks_of_the_smallest() -> None:
    answer = plan(rank(1, a=FULL), rank(0.75, a=FULL), rank(2, b=FULL, c=FULL))
    assert {config.num_blocks for config in answer.configs} == {12_288}
    assert [sum(tensor.size_bytes for tensor in config.tensors) / GIB for config in answer.configs] == [0.75, 0.75, 1.5]


def test_the_null_block_and_sinks_are_never_given_to_a_request() -> None:
    exact = {"max_model_len": 1600, "auto_fit_max_model_len": True, "num_blocks_override": 100}
    assert plan(rank(1, a=FULL), **exact).max_model_len == 99 * 16
    sinks = SinkFullAttentionSpec(16, **HEADS, sink_len=32)
    assert plan(rank(1, a=sinks), **exact).max_model_len == 97 * 16
    with refused(PlanError, field="num_blocks_override", match=r"\(101 blocks\), there are .* \(100 blocks\)"):
        plan(rank(1, a=FULL), max_model_len=1600, num_blocks_override=100)


def test_sinks_of_layers_with_pages_of_several_sizes_are_set_aside_too() -> None:
    wide = SinkFullAttentionSpec(16, **HEADS, sink_len=160)
    narrow = SinkFullAttentionSpec(16, **HEADS | {"num_kv_heads": 4}, sink_len=160)
    answer = plan(rank(1, a=wide, b=narrow), max_model_len=9999, auto_fit_max_model_len=True, num_blocks_override=64)
    assert answer.max_model_len == (64 - 1 - 10) * 16


def test_an_override_too_small_for_one_token_is_named() -> None:
    with pytest.raises(PlanError) as caught:
        plan(rank(1, a=FULL), num_blocks_override=1, auto_fit_max_model_len=True)
    assert (caught.value.reason, caught.value.field) == ("NOT_EVEN_ONE_TOKEN_FITS", "num_blocks_override")
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (2 * 65_536, 65_536)


def test_sinks_must_fill_the_blocks_of_all_ranks() -> None:
    with refused(PlanError, field="sink_len", reason="SINKS_DO_NOT_FIT_BLOCKS"):
        plan(rank(1, a=SinkFullAttentionSpec(16, **HEADS, sink_len=16)), decode_context_parallel_size=2)


def test_more_memory_than_blocks_can_be_numbered_is_left_over() -> None:
    tiny = FullAttentionSpec(1, 1, 1, "int8")
    assert plan(rank(2**40, a=tiny)).num_blocks == 2**31 - 1


def test_every_group_counts() -> None:
    layers = {"w": WINDOW, "f": FULL}
    with pytest.raises(PlanError) as caught:
        plan(rank(0.5, **layers), max_model_len=131_072)
    error = caught.value
    assert (error.needed_bytes, error.available_bytes) == ((193 + 8192 + 1) * 65_536, GIB // 2)
    assert error.estimated_max_model_len == (8192 - 193 - 1) * 16
    assert plan(rank(0.5, **layers), max_model_len=error.estimated_max_model_len)
    with pytest.raises(PlanError):
        plan(rank(0.5, **layers), max_model_len=error.estimated_max_model_len + 1)


@pytest.mark.parametrize("gib", [0, -1])
def test_no_memory_is_refused(gib: int) -> None:
    with pytest.raises(PlanError) as caught:
        plan(rank(1, a=FULL), rank(gib, a=FULL))
    assert (caught.value.reason, caught.value.field) == ("NO_MEMORY", "ranks[1].available_bytes")
    assert caught.value.available_bytes == gib * GIB


def test_disagreeing_ranks_get_an_error_with_layer_ranks_and_field() -> None:
    other = FullAttentionSpec(16, **HEADS | {"num_kv_heads": 4})
    words = r"layer 'b' differs in num_kv_heads between rank 0 \(8\) and rank 2 \(4\)"
    field = 'ranks[2].layers["b"].num_kv_heads'
    with refused(PlanError, field=field, reason="RANKS_DISAGREE_ON_A_LAYER", match=words):
        plan(rank(1, a=FULL, b=FULL), rank(1, a=FULL, b=FULL), rank(1, a=FULL, b=other))
    with pytest.raises(PlanError, match=r"in type between rank 0 \(FullAttentionSpec\) and rank 1 \(SlidingWindow"):
        plan(rank(1, a=FULL), rank(1, a=WINDOW))


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (FullAttentionSpec(16), "num_kv_heads"),
        (FullAttentionSpec(16, num_kv_heads=8), "head_size"),
        (FullAttentionSpec(16, num_kv_heads=8, head_size=128), "dtype"),
        (FullAttentionSpec(16, page_size_padded=1024), "num_kv_heads"),
        (MambaSpec(16), "shapes"),
    ],
)
def test_sizes_must_be_declared(spec: KVCacheSpec, field: str) -> None:
    with refused(PlanError, field=f'ranks[0].layers["a"].{field}', reason="SIZE_NOT_DECLARED"):
        plan(rank(1, a=spec))


def test_block_sizes_need_a_common_multiple_in_range() -> None:
    odd = MambaSpec(2**20 - 3, ((1,),), ("bfloat16",), page_size_padded=65_536)
    even = MambaSpec(2**20, ((1,),), ("bfloat16",), page_size_padded=65_536)
    with refused(PlanError, reason="NO_COMMON_BLOCK_SIZE", match="no common multiple"):
        plan(rank(64, a=odd, b=even, c=FULL), max_model_len=2**22)
    assert plan(rank(64, a=odd, b=even, c=FULL), max_model_len=2**19)  # one block holds the whole request


def test_layers_that_cannot_be_one_kind_need_hybrid_management() -> None:
    with refused(
        field="disable_hybrid_kv_cache_manager", match="FullAttentionSpec, MambaSpec cannot be managed as one"
    ):
        plan(rank(1, a=FULL, m=STATE), disable_hybrid_kv_cache_manager=True)


def test_windows_become_full_attention_without_hybrid_management() -> None:
    other = SlidingWindowSpec(16, **HEADS, sliding_window=512)
    answer = plan(rank(1, a=WINDOW, b=other), disable_hybrid_kv_cache_manager=True)
    assert [len(group.layer_names) for group in answer.groups] == [2]
    assert answer.blocks_per_request == 512


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_encoder_input_tokens": -1}, "max_num_encoder_input_tokens"),
        ({"num_blocks_override": -1}, "num_blocks_override"),
        ({"decode_context_parallel_size": 0}, "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 0}, "prefill_context_parallel_size"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], field: str) -> None:
    with refused(field=field):
        plan(rank(1, a=FULL), **options)


def test_a_plan_needs_a_rank() -> None:
    with refused(field="ranks"):
        plan()
