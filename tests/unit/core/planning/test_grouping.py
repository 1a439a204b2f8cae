"""Block sizes and padding of groups whose pages differ in size."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.planning.grouping import group_layers
from kvpool.core.planning.plan import GIB, KVCacheConfig, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    rare_hits,
)

HEADS: dict[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
FULL = FullAttentionSpec(16, **HEADS)  # 64 KiB
STATE = MambaSpec(16, ((3, 5000),), ("bfloat16",))  # 30,000 bytes


def window(token_bytes: int, block_size: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, 1, token_bytes // 2, "int8", sliding_window=1024)


def latent(token_bytes: int, block_size: int = 16) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size, head_size=token_bytes, dtype="int8")


def full(token_bytes: int, block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, 1, token_bytes // 2, "int8")


def block_sizes(*specs: KVCacheSpec) -> list[int]:
    groups = group_layers({f"l{i}": spec for i, spec in enumerate(specs)}, hybrid=True)
    assert len({group.spec.page_size_bytes for group in groups}) == 1
    return [group.spec.block_size for group in groups]


def config(**layers: KVCacheSpec) -> KVCacheConfig:
    return get_kv_cache_configs([RankMemory(layers, GIB)], PlanOptions(8192)).configs[0]


@pytest.mark.parametrize(
    ("specs", "sizes"),
    [
        ((latent(1152, 1920), window(512)), [1920, 3840]),  # 4,320 would fill the page: hits at multiples of 17,280
        ((latent(1152, 1536), window(1024)), [1536, 1536]),  # 1,728 would: 13,824
        ((full(60), window(30), window(20)), [16, 32, 32]),  # 48 would: 96
        ((full(60), window(30), window(10)), [16, 32, 96]),
        ((window(20, 96), full(50, 16)), [96, 32]),  # a divisor
        ((window(512, 64), full(700, 48)), [64, 48]),  # neither a multiple nor a divisor fits
        ((full(1000, 10), window(100, 16)), [10, 80]),
        ((full(1000, 16), window(300, 24)), [16, 48]),
        ((MambaSpec(16, ((17_280, 1152),), ("int8",)), full(9216), window(4096)), [16, 2160, 4320]),
    ],
)
def test_block_sizes_are_multiples_of_each_other(specs: tuple[KVCacheSpec, ...], sizes: list[int]) -> None:
    assert block_sizes(*specs) == sizes
    if math.lcm(*sizes) == max(sizes):
        assert not rare_hits(sizes, 2**17)


def test_pages_that_no_block_fills_are_padded_and_the_padding_is_reported() -> None:
    wide = FullAttentionSpec(16, **HEADS | {"num_kv_heads": 6})  # 48 KiB
    narrow = SlidingWindowSpec(16, **HEADS | {"num_kv_heads": 4}, sliding_window=1024)  # 32 KiB
    planned = config(a=wide, b=narrow)
    assert [group.spec.page_size_bytes for group in planned.groups] == [49_152, 49_152]
    assert planned.padding_bytes_per_block == (0, 16_384)
    assert planned.tensors[0].size_bytes == planned.num_blocks * 49_152


def test_a_state_is_padded_to_a_page_of_attention_and_the_other_way_round() -> None:
    assert config(a=FULL, m=STATE).padding_bytes_per_block == (0, 65_536 - 30_000)
    large = MambaSpec(16, ((100, 1000),), ("bfloat16",))  # 200,000 bytes: three pages of attention and a bit
    planned = config(a=FULL, m=large)
    assert [group.spec.block_size for group in planned.groups] == [48, 16]
    assert planned.padding_bytes_per_block == (200_000 - 3 * 65_536, 0)


def test_a_page_that_is_already_padded_is_filled_first() -> None:
    padded = SlidingWindowSpec(16, **HEADS | {"num_kv_heads": 4}, sliding_window=9, page_size_padded=49_152)
    (other,) = [group.spec for group in config(a=FULL, b=padded).groups if group.layer_names == ("b",)]
    assert (other.block_size, other.page_size_bytes, other.content_size_bytes) == (32, 65_536, 65_536)


def test_a_packed_page_and_one_of_few_states_are_filled() -> None:
    packed = FullAttentionSpec(16, **HEADS, num_head_slots=16, state_content_bytes=72)  # 18,432 bytes
    compressed = MLAAttentionSpec(16, head_size=576, dtype="bfloat16", tokens_per_state=4)  # 4,608 bytes
    large = MambaSpec(16, ((40_000,),), ("int8",))
    groups = group_layers({"a": packed, "b": compressed, "c": large}, hybrid=True)
    assert [(group.spec.block_size, group.spec.content_size_bytes) for group in groups] == [
        (32, 36_864),
        (128, 36_864),
        (16, 40_000),
    ]
    assert {group.spec.page_size_bytes for group in groups} == {40_000}


def test_a_circular_buffer_does_not_limit_the_others() -> None:
    buffer = CircularBufferSpec(10, 1, 64, dtype="int8")
    assert block_sizes(full(1024), window(512), buffer) == [16, 32, 250]


def test_sinks_stay_whole_blocks() -> None:
    sinks = SinkFullAttentionSpec(16, **HEADS, sink_len=48)
    large = MambaSpec(16, ((4, 32_768),), ("bfloat16",))  # four pages of the sinks' layer
    assert block_sizes(sinks, large) == [48, 16]


def test_latent_vectors_are_not_padded_beside_windows() -> None:
    """As in vLLM: kernels of sparse latent attention read whole rows of tokens."""
    mla, wide = MLAAttentionSpec(16, head_size=576, dtype="bfloat16"), window(2048)
    (group,) = group_layers({"a": mla, "b": wide}, hybrid=True)
    assert group.spec.page_size_bytes == mla.page_size_bytes + wide.page_size_bytes  # each has its own tensor
    assert block_sizes(latent(1024), window(2048)) == [32, 16]  # filled


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((0, 0, 8, 8), [(0, 1, 2, 3)]),
        ((8, 8, 0, 0), [(0, 1, 2, 3)]),
        ((8, 8, 9, 9, 9, 9, 0, 0), [(0, 1, 6, 7), (2, 3, 4, 5)]),
        ((0, 0, 9, 9, 8, 8, 8, 8), [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ],
)
def test_full_attention_of_at_most_one_remembered_window_shares_groups(
    windows: tuple[int, ...], groups: list[tuple[int, ...]]
) -> None:
    layers: dict[str, KVCacheSpec] = {f"{i}": replace(FULL, sliding_window=n) for i, n in enumerate(windows)}
    others = {f"w{i}": SlidingWindowSpec(16, **HEADS, sliding_window=1024) for i in range(4)}
    *found, last = group_layers(layers | others, hybrid=True)
    assert [tuple(map(int, group.layer_names)) for group in found] == groups
    assert [remembered_window(group.spec) for group in found] == [max(windows[i] for i in names) for names in groups]
    assert last.layer_names == tuple(others)


def remembered_window(spec: KVCacheSpec) -> int:
    assert isinstance(spec, FullAttentionSpec)
    return spec.sliding_window


def test_many_different_layers_are_grouped_at_once() -> None:
    """Ranks name layers and sizes as they like: the time must not grow with their square."""
    layers: dict[str, KVCacheSpec] = {f"f{i}": replace(FULL, sliding_window=i) for i in range(3000)}
    layers |= {f"l{i}": FullAttentionSpec(1, 1, 1 + i, "int8") for i in range(1000)}
    layers["state"] = MambaSpec(16, ((2**12, 2**12 - 3),), ("int8",))
    assert len(group_layers(layers, hybrid=True)) == 4001


@pytest.mark.parametrize(("windows", "num_groups"), [(29, 2), (30, 3)])
def test_padding_layers_fill_a_group_up_to_half_as_many_again(windows: int, num_groups: int) -> None:
    layers: dict[str, KVCacheSpec] = {f"f{i}": FULL for i in range(20)}
    layers |= {f"w{i}": SlidingWindowSpec(16, **HEADS, sliding_window=1024) for i in range(windows)}
    groups = group_layers(layers, hybrid=True)
    assert len(groups) == num_groups
