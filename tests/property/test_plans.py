"""For any layers and memory of the ranks, a plan is consistent, fits, and is as large as possible."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.grouping import layer_specs
from kvpool.core.planning.plan import Plan, PlanError, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

heads = st.sampled_from([1, 2, 3, 8])
block_sizes = st.sampled_from([8, 16, 48])
full = st.builds(FullAttentionSpec, block_sizes, heads, st.just(64), st.just("bfloat16"))
latent = st.builds(MLAAttentionSpec, block_sizes, head_size=st.just(576), dtype=st.just("bfloat16"))
window = st.builds(
    SlidingWindowSpec,
    block_sizes,
    heads,
    st.just(64),
    st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    sliding_window=st.sampled_from([17, 512]),
)
chunk = st.builds(
    ChunkedLocalAttentionSpec, block_sizes, heads, st.just(64), st.just("bfloat16"), attention_chunk_size=st.just(256)
)
state = st.builds(
    MambaSpec, st.sampled_from([16, 4096]), st.just(((3, 500), (7, 8, 9))), st.just(("bfloat16", "float32"))
)
encoder = st.builds(EncoderOnlyAttentionSpec, block_sizes, heads, st.just(64), st.just("bfloat16"))
kinds = st.lists(st.one_of(full, latent, window, chunk, state, encoder), min_size=1, max_size=3)


@st.composite
def rank_lists(draw: st.DrawFn) -> list[RankMemory]:
    """Pipeline stages of one or two tensor-parallel ranks, with layers of up to three specs."""
    specs = draw(kinds)
    ranks = []
    for stage in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.sampled_from(specs), max_size=8))
        layers: dict[str, KVCacheSpec] = {f"l.{stage}.{i}": spec for i, spec in enumerate(chosen)}
        memory = draw(st.lists(st.integers(1, 2**28), min_size=1, max_size=2))
        ranks += [RankMemory(layers, available_bytes) for available_bytes in memory]
    return ranks


def kept(rank: RankMemory) -> dict[str, KVCacheSpec]:
    return {name: spec for name, spec in rank.layers.items() if not isinstance(spec, EncoderOnlyAttentionSpec)}


def check(plan: Plan, ranks: list[RankMemory], options: PlanOptions) -> None:
    can_grow = []
    for rank, config in zip(ranks, plan.configs, strict=True):
        assert config.num_blocks == plan.num_blocks
        assert len(config.groups) == len(plan.groups)
        in_groups = Counter(name for group in config.groups for name in group.layer_names)
        in_tensors = Counter(name for tensor in config.tensors for name in tensor.shared_by)
        assert in_groups == in_tensors == Counter(dict.fromkeys(kept(rank), 1))
        pages = {name: spec for group in config.groups for name, spec in layer_specs(group)}
        group_of = {name: i for i, group in enumerate(config.groups) for name in group.layer_names}
        for tensor in config.tensors:
            stride = tensor.size_bytes // plan.num_blocks
            offsets = tensor.offsets_bytes or (0,) * len(tensor.shared_by)
            taken = Counter[tuple[int, int]]()
            for name, offset in zip(tensor.shared_by, offsets, strict=True):
                spec, asked = pages[name], rank.layers[name]
                taken.update((group_of[name], byte) for byte in (offset, offset + spec.page_size_bytes - 1))
                assert offset + spec.page_size_bytes <= stride
                assert options.block_outermost or (offset, stride) == (0, spec.page_size_bytes)
                assert spec.page_size_bytes >= spec.content_size_bytes
                if not options.disable_hybrid_kv_cache_manager:  # which gives all layers the blocks of full attention
                    assert spec.content_size_bytes >= asked.content_size_bytes
                    assert spec.block_size % asked.block_size == 0
            assert max(taken.values()) == 1
        used = sum(tensor.size_bytes for tensor in config.tensors)
        assert used == plan.num_blocks * config.block_size_bytes
        if config.tensors:
            assert used <= rank.available_bytes
            assert plan.blocks_per_request * config.block_size_bytes <= rank.available_bytes
            can_grow.append(used + config.block_size_bytes <= rank.available_bytes)
            for padding, group in zip(config.padding_bytes_per_block, config.groups, strict=True):
                contents = sum(pages[name].content_size_bytes for name in group.layer_names)
                assert padding == config.block_size_bytes - contents >= 0
    assert not can_grow or not all(can_grow)
    assert 0 < plan.max_model_len <= options.max_model_len
    assert plan.longest_request_tokens <= plan.max_model_len


@settings(max_examples=settings().max_examples * 3)
@given(
    ranks=rank_lists(),
    auto=st.booleans(),
    hybrid_off=st.booleans(),
    outermost=st.booleans(),
    max_model_len=st.sampled_from([64, 5000]),
)
def test_a_plan_is_consistent_and_fills_the_smallest_rank(
    ranks: list[RankMemory],
    auto: bool,  # noqa: FBT001
    hybrid_off: bool,  # noqa: FBT001
    outermost: bool,  # noqa: FBT001 - a strategy's
    max_model_len: int,
) -> None:
    kinds = {type(spec) for rank in ranks for spec in kept(rank).values()}
    options = PlanOptions(
        max_model_len,
        auto_fit_max_model_len=auto,
        disable_hybrid_kv_cache_manager=hybrid_off and MambaSpec not in kinds,
        block_outermost=outermost,
    )
    try:
        plan = get_kv_cache_configs(ranks, options)
    except InvalidArgumentError as refusal:
        check_refusal(refusal, ranks, options)
    else:
        check(plan, ranks, options)


def check_refusal(refusal: InvalidArgumentError, ranks: list[RankMemory], options: PlanOptions) -> None:
    if not isinstance(refusal, PlanError):
        assert (refusal.field, options.disable_hybrid_kv_cache_manager) == ("disable_hybrid_kv_cache_manager", True)
    elif options.auto_fit_max_model_len:
        assert refusal.reason == "NOT_EVEN_ONE_TOKEN_FITS"
    else:
        assert (refusal.reason, refusal.max_model_len) == ("ONE_REQUEST_DOES_NOT_FIT", options.max_model_len)
        assert refusal.needed_bytes > refusal.available_bytes
        longest = refusal.estimated_max_model_len
        assert longest < options.max_model_len
        if longest:
            assert get_kv_cache_configs(ranks, replace(options, max_model_len=longest)).max_model_len == longest
        with pytest.raises(PlanError):
            get_kv_cache_configs(ranks, replace(options, max_model_len=longest + 1))
