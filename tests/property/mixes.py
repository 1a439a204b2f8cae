"""Strategies for pools of mixed KV cache groups, small enough that blocks run out and requests share prefixes."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from kvpool.core.ids import PoolName
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    SPARSE_KINDS,
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
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig, ReuseOrder

MAX_TOKENS = 64
SIZES = ((1, 2, 3, 4, 6, 8), (1, 2, 4), (2, 3), (2, 3, 6), (1, 3), (4, 8), (1,), (2,), (4,))
"""Block sizes of a pool's groups: few per pool, so that short prefixes end in whole blocks of all groups."""


def specs(sizes: Sequence[int], dcp_world_size: int) -> st.SearchStrategy[KVCacheSpec]:
    """All kinds except cross attention and circular buffers."""
    size = st.sampled_from(sizes)
    return st.one_of(
        st.builds(FullAttentionSpec, size),
        st.builds(MLAAttentionSpec, size),
        st.builds(SlidingWindowSpec, size, sliding_window=st.integers(2, 14)),
        st.builds(
            SlidingWindowMLASpec,
            size,
            sliding_window=st.integers(2, 14),
            extra_retained_tokens=st.integers(0, 5),
        ),
        st.builds(ChunkedLocalAttentionSpec, size, attention_chunk_size=st.integers(1, 14)),
        st.builds(MambaSpec, size, num_speculative_blocks=st.integers(0, 2)),
        st.builds(
            lambda size, sinks: SinkFullAttentionSpec(size, sink_len=size * dcp_world_size * sinks),
            size,
            st.integers(1, 2),
        ),
    )


@st.composite
def configs(draw: st.DrawFn) -> PoolConfig:
    sizes, dcp_world_size = draw(st.sampled_from(SIZES)), draw(st.sampled_from([1, 1, 2]))
    count = draw(st.sampled_from([2, 1, 3, 4]))
    mix = draw(st.lists(specs(sizes, dcp_world_size), min_size=count, max_size=count))
    caching = draw(st.sampled_from([True] * 9 + [False]))
    if draw(st.sampled_from([False, False, True])):
        mix = draw(st.permutations([*mix[:3], CircularBufferSpec(draw(st.sampled_from(sizes)))]))
    if not caching and draw(st.booleans()):
        mix = draw(st.permutations([*mix[:3], CrossAttentionSpec(draw(st.sampled_from(sizes)))]))
    config = PoolConfig(
        PoolName("m"),
        draw(st.sampled_from([120, 90, 60, 45, 30])),
        MAX_TOKENS,
        tuple(KVCacheGroup(spec, (f"layer.{i}",), draw(st.booleans())) for i, spec in enumerate(mix)),
        reuse_order=draw(st.sampled_from(ReuseOrder)),
        enable_caching=caching,
        use_eagle=draw(st.booleans()),
        dcp_world_size=dcp_world_size,
        enable_events=draw(st.booleans()),
        allow_too_few_blocks=True,
    )
    is_sparse = any(isinstance(spec, SPARSE_KINDS) for spec in mix)
    times = draw(st.sampled_from([None, 0, 0, 1, 2, 3, 5] if is_sparse else [None, 0]))
    return replace(config, retention_tokens=None if times is None else times * config.hit_alignment)
