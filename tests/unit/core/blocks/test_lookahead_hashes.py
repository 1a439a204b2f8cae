"""Hashes that also cover tokens after their block come later than the block is full."""

from array import array
from typing import Any

import pytest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.events import BlockStored
from kvpool.core.ids import BlockHash
from kvpool.core.sessions.request import Request
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.core.specs.pool_config import HashScheme
from kvpool.core.steps.columns import Operation
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from support.core import BLOCK_SIZE, STEP, admit, block_hashes, config, opened, request_of

AHEAD = HashScheme(num_lookahead_tokens=1)


def pool_of(**options: Any) -> KVCacheManager:
    return KVCacheManager(config(hash_scheme=AHEAD, **options))


def grow(pool: KVCacheManager, request: Request, content: str, num_tokens: int) -> None:
    """Appends tokens whose blocks hold `content`, with the hashes that come with them."""
    request.num_tokens += num_tokens
    request.token_ids = list(range(request.num_tokens))
    joined = block_hashes(content, pool.config.num_hashes(request.num_tokens))
    request.hashes = [BlockHash(joined[i : i + 32]) for i in range(0, len(joined), 32)]


def test_a_full_block_is_cached_when_its_hash_comes() -> None:
    pool = pool_of()
    request = admit(pool, "ab", 8)
    assert len(pool.blocks.prefix_map) == 1
    grow(pool, request, "ab", 1)
    pool.cache_blocks(request, 8, sequence=STEP)
    assert len(pool.blocks.prefix_map) == 2


@pytest.mark.parametrize(("num_tokens", "hit"), [(4, []), (5, [1]), (8, [1]), (9, [1, 2]), (40, [1, 2, 3])])
def test_a_hit_ends_where_hashes_end(num_tokens: int, hit: list[int]) -> None:
    pool = pool_of()
    admit(pool, "abc", 13)
    assert pool.find_longest_cache_hit(request_of(pool, "abcdefghij", num_tokens)).block_ids == (hit,)


def test_a_hit_ends_before_all_tokens_that_hashes_look_ahead() -> None:
    pool = KVCacheManager(config(hash_scheme=HashScheme(num_lookahead_tokens=3)))
    admit(pool, "abc", 15)
    assert pool.find_longest_cache_hit(request_of(pool, "abc", 14)).num_tokens == 8
    assert pool.find_longest_cache_hit(request_of(pool, "abc", 15)).num_tokens == 12


def test_there_is_no_credit_before_the_hash_of_a_full_block_comes() -> None:
    pool = pool_of()
    request = admit(pool, "ab", 8)
    assert request.credit_tokens < 8
    grow(pool, request, "ab", 1)
    assert pool.allocate_slots(request, 1, sequence=STEP)
    assert request.credit_tokens == 11


def test_small_blocks_are_cached_up_to_the_hash_within_a_hit() -> None:
    """Of 8 tokens, a hit of the larger blocks, the last small block has no hash yet."""
    specs = [FullAttentionSpec(4), SlidingWindowSpec(8, sliding_window=20)]
    pool = pool_of(specs=specs, retention_tokens=0)
    admit(pool, "ab", 8)
    assert [pool.blocks.prefix_map.num_cached(manager) for manager in (0, 1)] == [1, 0]  # type: ignore[arg-type]


def test_events_and_snapshots_have_the_tokens_that_hashes_look_ahead() -> None:
    pool = pool_of(enable_events=True)
    admit(pool, "ab", 9)
    (event,) = pool.blocks.take_events()
    assert isinstance(event, BlockStored)
    assert (event.token_ids, event.lookahead_token_ids) == (array("I", range(8)), array("I", [4, 8]))
    assert event.lookahead_by_block == [[4], [8]]
    assert SnapshotCursor(pool).next_chunk(10) == [event]


def test_a_step_has_the_hashes_of_known_tokens() -> None:
    world, session = opened(hash_scheme=AHEAD)
    columns: dict[str, Any] = {"request_numbers": [1], "num_appended_tokens": [BLOCK_SIZE], "request_ids": ["r"]}
    with pytest.raises(InvalidArgumentError, match="block_hashes"):
        world.run(session, Operation.ADMIT, block_hashes=block_hashes("a", 1), **columns)
    world.run(session, Operation.ADMIT, **columns)
    world.run(
        session, Operation.APPEND, request_numbers=[1], num_appended_tokens=[1], block_hashes=block_hashes("a", 1)
    )
    assert len(session.by_number[1].hashes) == 1  # type: ignore[index]


def test_decodes_together_cache_blocks_when_their_hashes_come() -> None:
    world, session = opened(hash_scheme=AHEAD)
    world.admit(session, 1, "a", 7)
    num_cached = []
    for i in range(2):
        joined = block_hashes("ab", 2)[32:] if i else b""
        world.allocate(session, 1, 1, num_appended_tokens=[1], block_hashes=joined)
        num_cached.append(len(world.pool.blocks.prefix_map))
    assert num_cached == [1, 2]
