"""Taking blocks: all groups or none, a hit held before anything is taken, external room first. Numbers are room's."""

from collections.abc import Sequence

import pytest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.slot_allocator import SlotAllocator
from kvpool.core.ids import BlockId
from kvpool.core.sessions.request import Request
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import CrossAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions
from support.core import BLOCK_SIZE, admit, config, request_of

FULL = FullAttentionSpec(BLOCK_SIZE)
WINDOW = SlidingWindowSpec(BLOCK_SIZE, sliding_window=5)


def made(num_blocks: int, *specs: KVCacheSpec, enable_caching: bool = False) -> tuple[KVCacheManager, SlotAllocator]:
    pool = KVCacheManager(config(num_blocks, specs=specs, enable_caching=enable_caching))
    return pool, pool._slot_allocator


def no_hit(pool: KVCacheManager) -> tuple[Sequence[BlockId], ...]:
    return ((),) * len(pool.config.groups)


def given(request: Request) -> list[list[BlockId]]:
    return [table.block_ids for table in request.tables]


def test_all_groups_get_blocks_or_none() -> None:
    """Rule 1."""
    pool, room = made(6, FULL, WINDOW)
    request = request_of(pool, "", 12)
    assert room.allocate_plain(request, 12, 0) is None
    assert room.allocate_with_options(request, no_hit(pool), 0, 12, 0, DEFAULT_OPTIONS) is None
    assert (given(request), pool.blocks.num_free_blocks) == ([[], []], 5)
    assert room.allocate_plain(request, 8, 0) == ([1, 2], [3, 4])
    assert room.allocate_plain(request, 8, 0) is room.no_blocks


def test_both_ways_allocate_the_same_with_default_options() -> None:
    for num_slots in range(1, 30):
        plain, options = made(12, FULL, WINDOW), made(12, FULL, WINDOW)
        requests = [request_of(pool, "", 30) for pool, _ in (plain, options)]
        taken = plain[1].allocate_plain(requests[0], num_slots, 0)
        assert (
            options[1].allocate_with_options(requests[1], no_hit(options[0]), 0, num_slots, 0, DEFAULT_OPTIONS) == taken
        )
        assert list(plain[0].blocks.free_list) == list(options[0].blocks.free_list)


def test_a_group_does_not_take_blocks_of_another_groups_hit() -> None:
    """Rule 2: blocks 1 to 4 hold the hit, and would be the first to be taken."""
    pool = KVCacheManager(config(8, specs=[FULL, FULL], reuse_order=ReuseOrder.LRU))
    request = admit(pool, "ab", 8)
    hit = tuple(list(ids) for ids in given(request))
    admit(pool, "x", 4)
    pool.free(request)
    taker = request_of(pool, "ab", 13)
    assert (
        pool._slot_allocator.allocate_with_options(taker, hit, 9, 12, 0, AllocationOptions(num_external_tokens=1))
        is None
    )  # two lack, one is free
    assert list(pool.blocks.free_list) == [7, 2, 1, 4, 3]
    with_one_more = KVCacheManager(config(9, specs=[FULL, FULL], reuse_order=ReuseOrder.LRU))
    request = admit(with_one_more, "ab", 8)
    hit = tuple(list(ids) for ids in given(request))
    admit(with_one_more, "x", 4)
    with_one_more.free(request)
    taker = request_of(with_one_more, "ab", 13)
    new = with_one_more._slot_allocator.allocate_with_options(
        taker, hit, 9, 12, 0, AllocationOptions(num_external_tokens=1)
    )
    assert (new, given(taker)) == (([7], [8]), [[1, 2, 7], [3, 4, 8]])


def test_external_tokens_get_blocks_first_in_all_groups() -> None:
    """Rule 3."""
    pool, room = made(20, FULL, MambaSpec(BLOCK_SIZE), FULL)
    request = request_of(pool, "", 16)
    room.allocate_with_options(request, no_hit(pool), 6, 16, 0, AllocationOptions(num_external_tokens=6))
    assert given(request) == [[1, 2, 7, 8], [3, 4, 9, 10], [5, 6, 11, 12]]


def test_the_encoders_tokens_are_not_external() -> None:
    pool, room = made(20, CrossAttentionSpec(BLOCK_SIZE), FULL)
    request = request_of(pool, "", 16)
    room.allocate_with_options(request, no_hit(pool), 8, 16, 7, AllocationOptions(num_external_tokens=8))
    assert given(request) == [[3, 4], [1, 2, 5, 6]]


@pytest.mark.parametrize(("num_spare", "fits"), [(0, True), (3, True), (4, False), (20, False)])
def test_reserved_and_watermark_blocks_stay_free(num_spare: int, *, fits: bool) -> None:
    pool, room = made(6, FULL)
    for options in (
        AllocationOptions(num_reserved_blocks=num_spare),
        AllocationOptions(num_watermark_blocks=num_spare),
    ):
        request = request_of(pool, "", 8)
        assert (room.allocate_with_options(request, no_hit(pool), 0, 8, 0, options) is not None) is fits
        pool.free(request)


def test_fits_full_sequence_changes_nothing() -> None:
    pool, room = made(8, FULL, WINDOW)
    request = request_of(pool, "", 20)  # five, and as many: a window may have all tokens in flight
    assert not room.fits_full_sequence(request, no_hit(pool), 0, DEFAULT_OPTIONS)
    request.num_tokens = 12
    assert room.fits_full_sequence(request, no_hit(pool), 0, DEFAULT_OPTIONS)
    assert not room.fits_full_sequence(request, no_hit(pool), 0, AllocationOptions(num_watermark_blocks=2))
    assert given(request) == [[], []]


def test_encoder_tokens_count_for_the_full_sequence() -> None:
    pool, room = made(6, CrossAttentionSpec(BLOCK_SIZE), FULL)
    request = request_of(pool, "", 12)
    assert room.fits_full_sequence(request, no_hit(pool), 8, DEFAULT_OPTIONS)
    assert not room.fits_full_sequence(request, no_hit(pool), 9, DEFAULT_OPTIONS)


def test_the_full_sequence_is_limited_to_max_model_len() -> None:
    pool, room = made(66, FULL)
    request = request_of(pool, "", 257)
    assert room.fits_full_sequence(request, no_hit(pool), 0, AllocationOptions(num_watermark_blocks=1))
