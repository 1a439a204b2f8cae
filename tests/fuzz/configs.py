"""Pools and ranks of the grammars: small, so that blocks run out and prefixes are shared."""

from functools import lru_cache
from hashlib import sha256
from typing import Final

from kvpool.core.ids import PoolName
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvpool.core.specs.pool_config import HashScheme, KVCacheGroup, PoolConfig, ReuseOrder
from kvpool.v1 import pool_pb2
from kvpool.wire.pools import config_to_proto

MAX_MODEL_LEN: Final = 96
_OWN_HASH: Final = HashScheme("fuzz", 8)


def _config(name: str, num_blocks: int, *specs: KVCacheSpec, **options: object) -> PoolConfig:
    groups = tuple(KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(specs))
    return PoolConfig(PoolName(name), num_blocks, MAX_MODEL_LEN, groups, **options)  # type: ignore[arg-type]


CONFIGS: Final[tuple[PoolConfig, ...]] = (
    _config("p0", 40, FullAttentionSpec(4), num_host_blocks=30),
    _config(
        "p1",
        48,
        FullAttentionSpec(4),
        SlidingWindowSpec(4, sliding_window=10),
        enable_events=True,
        max_in_flight_tokens=16,
        num_host_blocks=60,
    ),
    _config("p2", 32, FullAttentionSpec(2), enable_caching=False, allow_too_few_blocks=True),
    _config("p3", 44, MambaSpec(8, num_speculative_blocks=1), FullAttentionSpec(4), reuse_order=ReuseOrder.LRU),
    _config("p4", 36, SinkFullAttentionSpec(4, sink_len=8), ChunkedLocalAttentionSpec(2, attention_chunk_size=8)),
    _config("p5", 40, MLAAttentionSpec(3), CrossAttentionSpec(4), enable_caching=False),
    _config("p6", 30, FullAttentionSpec(4), use_eagle=True, enable_events=True, hash_scheme=_OWN_HASH),
    _config(
        "p7", 52, FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=7), retention_tokens=0, enable_events=True
    ),
    _config(
        "p8",
        48,
        CircularBufferSpec(8),
        MLAAttentionSpec(4, tokens_per_state=2),
        SlidingWindowMLASpec(4, sliding_window=6, extra_retained_tokens=3),
        enable_events=True,
    ),
    _config(
        "p9",
        50,
        FullAttentionSpec(4),
        MambaSpec(4, num_speculative_blocks=1, only_step_ends=True, prefill_checkpoint_alignment=1),
        enable_events=True,
    ),
    _config(
        "p10",
        40,
        FullAttentionSpec(8),
        MambaSpec(8, only_step_ends=True),
        prefix_match_unit=2,
        partial_hits=True,
        enable_events=True,
    ),
)
POOL_NAMES: Final = tuple(config.name for config in CONFIGS)
RANK_POOLS: Final = ("r0", "r1", "r2", "r3")
DECLARED_POOL: Final = "r3"
"""The pool of which most ranks declare their memory."""


@lru_cache(maxsize=1)
def messages() -> tuple[pool_pb2.PoolConfig, ...]:
    """The configurations as messages."""
    return tuple(config_to_proto(config, with_none_hash=True) for config in CONFIGS)


@lru_cache(maxsize=4096)
def block_hash(document: int, index: int, size_bytes: int) -> bytes:
    """Hash of a document's block; the first two blocks of all documents are equal."""
    content = f"{document if index > 1 else 0}:{index}"
    return (sha256(content.encode()).digest() * 2)[:size_bytes]
