"""Configurations check themselves, and say in what two differ."""

from dataclasses import replace

import pytest

from kvpool.server.core.config import (
    FullAttentionSpec,
    HashScheme,
    KVCacheGroup,
    KVCacheSpec,
    MLAAttentionSpec,
    PoolConfig,
    ReuseOrder,
)
from kvpool.server.core.errors import InvalidArgumentError
from kvpool.server.core.types import PoolName
from support_core import config


def group(spec: KVCacheSpec, *names: str) -> tuple[KVCacheGroup, ...]:
    return (KVCacheGroup(spec, names),)


BAD = {
    "config.name": replace(config(), name=PoolName("a b")),
    "config.num_blocks": replace(config(), num_blocks=2**31),
    "config.max_model_len": replace(config(), max_model_len=-1),
    "config.dcp_world_size": replace(config(), dcp_world_size=0),
    "config.groups": replace(config(), groups=group(FullAttentionSpec(4)) * 2),
    "config.groups[0].spec.block_size": replace(config(), groups=group(FullAttentionSpec(0))),
    "config.groups[0].spec.num_kv_heads": replace(config(), groups=group(FullAttentionSpec(4, -1))),
    "config.groups[0].spec.head_size": replace(config(), groups=group(MLAAttentionSpec(4, -1))),
    "config.groups[0].spec.dtype": replace(config(), groups=group(MLAAttentionSpec(4, 1, "x" * 33))),
    "config.groups[0].layer_names[1]": replace(config(), groups=group(FullAttentionSpec(4), "a", "a")),
    "config.hash_scheme.algorithm": replace(config(), hash_scheme=HashScheme("")),
    "config.hash_scheme.size_bytes": replace(config(), hash_scheme=HashScheme("xxhash_cbor", 32)),
    "config.hash_scheme.none_hash": replace(config(), hash_scheme=HashScheme(none_hash=b"n" * 65)),
}


@pytest.mark.parametrize("field", BAD)
def test_names_the_field_that_is_out_of_range(field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        BAD[field].check()
    assert caught.value.field == field


def test_one_hash_covers_a_block_of_all_ranks() -> None:
    assert replace(config(), dcp_world_size=2).hash_block_size == 8


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (config(), ""),
        (config(21), "num_blocks"),
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
