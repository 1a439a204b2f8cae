"""A pool holds one request of maximum length, or is refused: the numbers equal what allocation needs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvpool.core.specs.longest_request import longest_fitting, most_held_blocks, shortfall
from kvpool.core.specs.pool_config import PoolConfig
from support.core import config, num_allocated
from support.refusals import refused
from support.state import DrivenState

FULL = FullAttentionSpec(4)
NONE_HASH = b"n" * 32
MIXES: dict[str, tuple[Sequence[KVCacheSpec], dict[str, Any]]] = {
    "full": ([FULL], {}),
    "length within a block": ([FULL], {"max_model_len": 101}),
    "latent": ([MLAAttentionSpec(3)], {}),
    "sinks": ([SinkFullAttentionSpec(4, sink_len=8)], {}),
    "window": ([SlidingWindowSpec(4, sliding_window=10)], {}),
    "window of whole blocks and a token": ([SlidingWindowSpec(4, sliding_window=9)], {}),
    "window of one token": ([FULL, SlidingWindowSpec(4, sliding_window=1)], {}),
    "window beyond the length": ([SlidingWindowSpec(4, sliding_window=500)], {}),
    "window with tokens in flight": ([SlidingWindowSpec(4, sliding_window=10)], {"max_in_flight_tokens": 30}),
    "all tokens in flight": ([SlidingWindowSpec(4, sliding_window=10)], {"max_in_flight_tokens": 1000}),
    "chunks": ([ChunkedLocalAttentionSpec(4, attention_chunk_size=16)], {}),
    "chunks that end within a block": ([ChunkedLocalAttentionSpec(4, attention_chunk_size=18)], {}),
    "chunks with tokens in flight": (
        [ChunkedLocalAttentionSpec(4, attention_chunk_size=18)],
        {"max_in_flight_tokens": 30},
    ),
    "state": ([MambaSpec(8)], {}),
    "state for drafts": ([MambaSpec(8, num_speculative_blocks=2)], {}),
    "state with tokens in flight": ([MambaSpec(8)], {"max_in_flight_tokens": 30}),
    "layers of one kind": ([UniformTypeKVCacheSpecs(4, (("layer.0", SlidingWindowSpec(4, sliding_window=10)),))], {}),
    "full and window": ([FULL, SlidingWindowSpec(4, sliding_window=10)], {}),
    "chunk that ends before the end": ([FULL, ChunkedLocalAttentionSpec(4, attention_chunk_size=84)], {}),
    "different blocks": ([FullAttentionSpec(8), SlidingWindowSpec(4, sliding_window=7), MambaSpec(16)], {}),
    "several windows": ([SlidingWindowSpec(4, sliding_window=size) for size in (3, 8, 10, 21)], {}),
    "context parallelism": ([FULL, SlidingWindowSpec(4, sliding_window=10)], {"dcp_world_size": 2}),
}


def make(specs: Sequence[KVCacheSpec], num_blocks: int = 2**20, **options: Any) -> PoolConfig:
    options = {"enable_caching": False, "allow_too_few_blocks": False, "max_model_len": 100, **options}
    max_model_len = options.pop("max_model_len")
    return replace(config(num_blocks, specs=specs, **options), max_model_len=max_model_len)


def smallest(declared: PoolConfig) -> PoolConfig:
    """The same pool with the fewest blocks that are accepted."""
    num_blocks = next(
        count for count in range(2, 200) if not shortfall(replace(declared, num_blocks=count + reserved(declared)))
    )
    return replace(declared, num_blocks=num_blocks + reserved(declared))


def reserved(declared: PoolConfig) -> int:
    return sum(declared.num_sink_blocks)


@pytest.mark.parametrize("mix", MIXES)
def test_the_smallest_pool_holds_a_request_and_one_block_fewer_is_refused(mix: str) -> None:
    specs, options = MIXES[mix]
    fits = smallest(make(specs, **options))
    assert num_allocated(fits) == fits.max_model_len
    assert DrivenState().create_pool(fits, NONE_HASH)[1]

    one_fewer, state = replace(fits, num_blocks=fits.num_blocks - 1), DrivenState()
    assert num_allocated(one_fewer) < fits.max_model_len
    longest = int(shortfall(one_fewer).split()[-2])
    assert 0 <= longest < fits.max_model_len
    assert not longest or num_allocated(replace(one_fewer, max_model_len=longest)) == longest
    assert num_allocated(replace(one_fewer, max_model_len=longest + 1)) < longest + 1
    with refused(field="config.num_blocks", reason="ONE_REQUEST_DOES_NOT_FIT"):
        state.create_pool(one_fewer, NONE_HASH)
    assert list(state.pools) == []
    assert state.create_pool(fits, NONE_HASH)[1]


def test_a_refusal_states_the_numbers() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        DrivenState().create_pool(make([SinkFullAttentionSpec(4, sink_len=8)], 20), NONE_HASH)
    assert str(refused.value) == (
        "config.num_blocks: one request of 100 tokens needs 25 blocks, 17 are available without the null block,"
        " sinks, and what quotas withhold; the longest that fits has 68 tokens: add blocks, lower max_model_len, or set"
        " allow_too_few_blocks"
    )


def test_a_pool_with_too_few_blocks_can_be_allowed() -> None:
    state = DrivenState()
    pool, _ = state.create_pool(make([FULL], 20, allow_too_few_blocks=True), NONE_HASH)
    assert pool.config.allow_too_few_blocks


def test_a_second_declaration_need_not_allow_what_the_first_allowed() -> None:
    state, allowed = DrivenState(), make([FULL], 20, allow_too_few_blocks=True)
    pool, _ = state.create_pool(allowed, NONE_HASH)
    assert state.create_pool(replace(allowed, allow_too_few_blocks=False), NONE_HASH) == (pool, False)


def test_a_pool_of_ranks_is_not_checked_again() -> None:
    pool = DrivenState().open_epoch(make([FULL], 20), NONE_HASH, 5)
    assert pool.config.num_blocks == 20


def test_encoder_tokens_are_not_counted() -> None:
    declared = make([FULL, CrossAttentionSpec(4)])
    assert most_held_blocks(declared, 100) == 25


def test_drafts_of_eagle_are_not_counted() -> None:
    assert most_held_blocks(make([FULL], use_eagle=True), 100) == 25


def test_long_requests_are_counted_at_few_points() -> None:
    length = 2**31 - 1
    declared = make([FullAttentionSpec(16), SlidingWindowSpec(16, sliding_window=1024)], 2**27, max_model_len=length)
    assert most_held_blocks(declared, length) == 2**27 + 65
    assert "needs 134217793 blocks" in shortfall(declared)


def test_longest_fitting_is_0_if_none_fits() -> None:
    assert longest_fitting(10, lambda _: False) == 0
    assert longest_fitting(10, lambda length: length <= 7) == 7
    assert longest_fitting(10, lambda _: True) == 10
