"""Rules of slot_allocator, by number."""

from collections.abc import Sequence

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.blocks.slot_allocator import SlotAllocator
from kvpool.core.ids import BlockId, StepNumber
from kvpool.core.sessions.request import Request
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import CrossAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions
from support.core import BLOCK_SIZE, admit, config, request_of

FULL = FullAttentionSpec(BLOCK_SIZE)
WINDOW = SlidingWindowSpec(BLOCK_SIZE, sliding_window=5)


def make(num_blocks: int, *specs: KVCacheSpec, enable_caching: bool = False) -> tuple[KVCacheManager, SlotAllocator]:
    pool = KVCacheManager(config(num_blocks, specs=specs, enable_caching=enable_caching))
    return pool, pool._slot_allocator


STEP = StepNumber(1)


def no_hit(pool: KVCacheManager) -> tuple[Sequence[BlockId], ...]:
    return ((),) * len(pool.config.groups)


def blocks_of(request: Request) -> list[list[BlockId]]:
    return [table.block_ids for table in request.tables]


def test_all_groups_get_blocks_or_none() -> None:
    """Rule 1."""
    pool, allocator = make(6, FULL, WINDOW)
    request = request_of(pool, "", 12)
    assert allocator.allocate(request, None, 0, 12, 12, 0, DEFAULT_OPTIONS, STEP) is None
    assert (blocks_of(request), pool.blocks.num_free_blocks) == ([[], []], 5)
    assert allocator.allocate(request, None, 0, 8, 8, 0, DEFAULT_OPTIONS, STEP) == ([1, 2], [3, 4])
    assert allocator.allocate(request, None, 0, 8, 8, 0, DEFAULT_OPTIONS, STEP) == ((), ())


def test_a_group_does_not_take_blocks_of_another_groups_hit() -> None:
    """Rule 2: blocks 1 to 4 hold the hit, and are next in the free list."""
    for num_blocks, answer, table in ((8, None, [[], []]), (9, ([7], [8]), [[1, 2, 7], [3, 4, 8]])):
        pool = KVCacheManager(config(num_blocks, specs=[FULL, FULL], reuse_order=ReuseOrder.LRU))
        request = admit(pool, "ab", 8)
        hit = tuple(list(ids) for ids in blocks_of(request))
        admit(pool, "x", 4)
        pool.free(request)
        taker, free = request_of(pool, "ab", 13), list(pool.blocks.free_list)
        options = AllocationOptions(num_external_tokens=1)
        new = pool._slot_allocator.allocate(taker, ComputedBlocks(hit, 8), 9, 12, 12, 0, options, STEP)
        assert (new, blocks_of(taker)) == (answer, table)
        assert new or list(pool.blocks.free_list) == free


def test_external_tokens_get_blocks_first_in_all_groups() -> None:
    """Rule 3."""
    pool, allocator = make(20, FULL, MambaSpec(BLOCK_SIZE), FULL)
    request = request_of(pool, "", 16)
    allocator.allocate(request, None, 6, 16, 16, 0, AllocationOptions(num_external_tokens=6), STEP)
    assert blocks_of(request) == [[1, 2, 6, 7], [0, 3, 8, 9], [4, 5, 10, 11]]


def test_the_encoders_tokens_are_not_external() -> None:
    pool, allocator = make(20, CrossAttentionSpec(BLOCK_SIZE), FULL)
    request = request_of(pool, "", 16)
    allocator.allocate(request, None, 8, 16, 16, 7, AllocationOptions(num_external_tokens=8), STEP)
    assert blocks_of(request) == [[3, 4], [1, 2, 5, 6]]


def test_fits_full_sequence_changes_nothing() -> None:
    pool, allocator = make(8, FULL, WINDOW)
    request = request_of(pool, "", 20)  # five blocks in each group: a window can have all tokens in flight
    assert not allocator.fits_full_sequence(request, no_hit(pool), 0, 0, DEFAULT_OPTIONS)
    request.num_tokens = 12
    assert allocator.fits_full_sequence(request, no_hit(pool), 0, 0, DEFAULT_OPTIONS)
    assert not allocator.fits_full_sequence(request, no_hit(pool), 0, 0, AllocationOptions(num_watermark_blocks=2))
    assert blocks_of(request) == [[], []]


def test_encoder_tokens_count_for_the_full_sequence() -> None:
    pool, allocator = make(6, CrossAttentionSpec(BLOCK_SIZE), FULL)
    request = request_of(pool, "", 12)
    assert allocator.fits_full_sequence(request, no_hit(pool), 0, 8, DEFAULT_OPTIONS)
    assert not allocator.fits_full_sequence(request, no_hit(pool), 0, 9, DEFAULT_OPTIONS)


def test_the_full_sequence_is_limited_to_max_model_len() -> None:
    pool, allocator = make(66, FULL)
    request = request_of(pool, "", 257)
    assert allocator.fits_full_sequence(request, no_hit(pool), 0, 0, AllocationOptions(num_watermark_blocks=1))
