"""Configurations validate themselves, and report in which field two of them differ."""

from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.ids import GroupId, PoolName
from kvpool.core.specs.base import AttentionSpec, KVCacheSpec
from kvpool.core.specs.kinds import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvpool.core.specs.pool_config import HashScheme, KVCacheGroup, PoolConfig, ReuseOrder
from support.core import config
from support.refusals import refused

STATES = MambaSpec(8, only_step_ends=True)
WINDOW = SlidingWindowSpec(4, sliding_window=8)


def group(spec: KVCacheSpec, *names: str) -> tuple[KVCacheGroup, ...]:
    return (KVCacheGroup(spec, names),)


def groups(*specs: KVCacheSpec) -> tuple[KVCacheGroup, ...]:
    return tuple(map(KVCacheGroup, specs))


BAD = {
    "config.name": replace(config(), name=PoolName("a b")),
    "config.num_blocks": replace(config(), num_blocks=2**31),
    "config.max_model_len": replace(config(), max_model_len=-1),
    "config.dcp_world_size": replace(config(), dcp_world_size=0),
    "config.groups": replace(config(), groups=()),
    "config.groups[0].spec": replace(config(), groups=groups(EncoderOnlyAttentionSpec(4))),
    "config.groups[0].spec.sink_len": replace(
        config(), groups=groups(SinkFullAttentionSpec(4, sink_len=4)), dcp_world_size=2
    ),
    "config.disable_caching": replace(config(), groups=groups(FullAttentionSpec(4), CrossAttentionSpec(4))),
    "config.groups[0].layer_names[1]": replace(config(), groups=group(FullAttentionSpec(4), "a", "a")),
    "config.retention_tokens": replace(config(), retention_tokens=-1),
    "config.hash_scheme.algorithm": replace(config(), hash_scheme=HashScheme("")),
    "config.hash_scheme.size_bytes": replace(config(), hash_scheme=HashScheme("xxhash_cbor", 32)),
    "config.hash_scheme.none_hash": replace(config(), hash_scheme=HashScheme(none_hash=b"n" * 65)),
}


@pytest.mark.parametrize("field", BAD)
def test_names_the_field_that_is_out_of_range(field: str) -> None:
    with refused(field=field):
        BAD[field].check()


@pytest.mark.parametrize(
    ("specs", "retention_tokens", "message"),
    [
        ([FullAttentionSpec(4)], 4, "without a sliding window"),
        ([SlidingWindowSpec(4, sliding_window=8), FullAttentionSpec(6)], 18, "not a multiple of 12"),
    ],
)
def test_sparse_caching_needs_windows_and_whole_hits(
    specs: list[KVCacheSpec], retention_tokens: int, message: str
) -> None:
    sparse = replace(config(), groups=groups(*specs), retention_tokens=retention_tokens)
    with refused(field="config.retention_tokens", match=message):
        sparse.check()
    replace(sparse, retention_tokens=None).check()


@pytest.mark.parametrize(
    ("specs", "options", "field", "message"),
    [
        ([FullAttentionSpec(4)], {"prefix_match_unit": 3}, "prefix_match_unit", "does not divide"),
        ([FullAttentionSpec(4)], {"prefix_match_unit": -1}, "prefix_match_unit", "not in"),
        ([FullAttentionSpec(4), MambaSpec(8)], {"partial_hits": True}, "partial_hits", "needs caching, states"),
        ([FullAttentionSpec(4), STATES], {"partial_hits": True, "enable_caching": False}, "partial_hits", "caching"),
        ([WINDOW, STATES], {"partial_hits": True, "use_eagle": True}, "partial_hits", "EAGLE"),
        (
            [WINDOW, STATES],
            {"partial_hits": True, "prefix_match_unit": 2},
            "partial_hits",
            "blocks of group 0 have 4 tokens",
        ),
    ],
)  # fmt: skip
def test_hits_within_blocks_need_states_and_whole_hashes(
    specs: list[KVCacheSpec], options: dict[str, Any], field: str, message: str
) -> None:
    with refused(field=f"config.{field}", match=message):
        replace(config(), groups=groups(*specs), **options).check()
    partial = replace(config(), groups=groups(FullAttentionSpec(4), STATES), partial_hits=True)
    partial.check()
    assert (partial.hit_alignment, partial.block_alignment, partial.rare_hits) == (4, 8, "")


def test_block_sizes_need_a_common_multiple() -> None:
    odd = replace(config(), groups=groups(*map(FullAttentionSpec, (2**20, 2**20 - 1))), max_model_len=2**21)
    with refused(field="config.groups", match="no common multiple"):
        odd.check()
    replace(odd, enable_caching=False).check()
    replace(odd, max_model_len=2**20).check()  # a block holds a whole request


@pytest.mark.parametrize(
    ("block_sizes", "changes", "multiple"),
    [
        ((1536, 3456), {}, "13,824"),
        ((1536, 3456), {"enable_caching": False}, ""),
        ((1536, 3456), {"max_model_len": 3456}, ""),  # a block of the second holds a whole request
        ((1536, 3072, 16), {}, ""),
    ],
)
def test_block_sizes_with_a_large_common_multiple_are_described(
    block_sizes: tuple[int, ...], changes: dict[str, Any], multiple: str
) -> None:
    uneven = replace(config(), groups=groups(*map(FullAttentionSpec, block_sizes)), max_model_len=2**17)
    pool = replace(uneven, **changes)
    assert (f"in multiples of {multiple} tokens only" in pool.rare_hits) if multiple else not pool.rare_hits


def test_at_most_eight_block_sizes() -> None:
    sizes = [2**i for i in range(9)]
    replace(config(), groups=groups(*map(FullAttentionSpec, sizes[:8]))).check()
    with refused(field="config.groups", match="blocks of 9 different sizes, at most 8"):
        replace(config(), groups=groups(*map(FullAttentionSpec, sizes))).check()


UNIFORM = UniformTypeKVCacheSpecs(4, (("a", FullAttentionSpec(4)), ("b", FullAttentionSpec(4, 2))))


@pytest.mark.parametrize(
    ("layers", "field"),
    [
        (group(UNIFORM, "a"), "config.groups[0].layer_names"),
        (group(UNIFORM, "b", "a") + group(FullAttentionSpec(4), "a"), "config.groups[1].layer_names[0]"),
        (group(FullAttentionSpec(4), "b") + group(UNIFORM), "config.groups[1].layer_names[1]"),
        (group(UniformTypeKVCacheSpecs(4, (("", FullAttentionSpec(4)),))), "config.groups[0].layer_names[0]"),
        (group(FullAttentionSpec(4), *map(str, range(4097))), "config.groups[0].layer_names"),
    ],
)
def test_layers_of_all_groups_are_checked(layers: tuple[KVCacheGroup, ...], field: str) -> None:
    with refused(field=field):
        replace(config(), groups=layers).check()
    replace(config(), groups=group(UNIFORM, "b", "a")).check()


def test_a_spec_must_be_a_known_kind() -> None:
    with refused(field="config.groups[0].spec", match="AttentionSpec is not a kind of attention"):
        replace(config(), groups=groups(AttentionSpec(4))).check()


def test_sinks_must_leave_other_blocks() -> None:
    replace(config(4), groups=groups(SinkFullAttentionSpec(4, sink_len=8))).check()
    with refused(field="config.num_blocks"):
        replace(config(3), groups=groups(SinkFullAttentionSpec(4, sink_len=8))).check()


def test_context_parallelism_shards_tokens_but_not_states() -> None:
    mixed = replace(config(), groups=groups(SlidingWindowSpec(4, sliding_window=9), MambaSpec(4)), dcp_world_size=2)
    assert [mixed.span_tokens(group_id) for group_id in (GroupId(0), GroupId(1))] == [8, 4]
    assert (mixed.hash_block_size, mixed.hit_alignment) == (4, 8)


def test_one_hash_covers_a_block_of_all_ranks() -> None:
    assert replace(config(), dcp_world_size=2).hash_block_size == 8


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (config(), ""),
        (config(21), "num_blocks"),
        (config(allow_too_few_blocks=False), ""),
        (config(block_size=8), "groups"),
        (replace(config(), reuse_order=ReuseOrder.LRU), "reuse_order"),
        (replace(config(), hash_scheme=HashScheme(size_bytes=32)), ""),
        (replace(config(), hash_scheme=HashScheme("mine")), "hash_scheme.algorithm"),
        (replace(config(), hash_scheme=HashScheme(none_hash=b"other")), "hash_scheme.none_hash"),
    ],
)
def test_names_the_first_difference(other: PoolConfig, field: str) -> None:
    drawn = replace(config(), hash_scheme=HashScheme(none_hash=b"n" * 32))
    assert drawn.difference(other) == field
