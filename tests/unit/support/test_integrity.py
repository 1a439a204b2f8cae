"""The integrity check finds each kind of corrupted state, with a specific message."""

from collections.abc import Callable

import pytest

from kvpool.core.blocks.integrity import IntegrityError
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import NULL_BLOCK, BlockHash, BlockId, GroupId, MapId, RequestNumber, SessionNumber, StepNumber
from kvpool.core.sessions.session import Session
from support.core import World
from support.integrity import check_integrity

Cook = Callable[[KVCacheManager, Session], object]


@pytest.fixture
def world() -> World:
    """Request 1 holds blocks 1 to 4, of which three are cached."""
    world = World(num_blocks=9)
    world.admit(world.open(), 1, "abc", 13)
    return world


def cook_hash_of_nobody(pool: KVCacheManager, _: Session) -> None:
    pool.blocks.prefix_map.insert(MapId(0), [BlockId(4)], [BlockHash(b"h")], SessionNumber(99), StepNumber(1))


def cook_computed_without_room(pool: KVCacheManager, session: Session) -> None:
    del pool
    session.by_number[RequestNumber(1)].num_computed_tokens = 17


def cook_null_block_in_a_table(_: KVCacheManager, session: Session) -> None:
    session.by_number[RequestNumber(1)].tables[0].block_ids[0] = NULL_BLOCK


def cook_more_cached_than_held(_: KVCacheManager, session: Session) -> None:
    session.by_number[RequestNumber(1)].tables[0].num_cached = 5


def cook_used_blocks(pool: KVCacheManager, _: Session) -> None:
    pool.blocks.group_counters[0].used_blocks += 1


def cook_evicted_blocks(pool: KVCacheManager, _: Session) -> None:
    pool.blocks.group_counters[0].evicted_blocks += 1


def cook_cached_blocks(pool: KVCacheManager, _: Session) -> None:
    pool.blocks.prefix_map._num_maps = 2
    pool.blocks.prefix_map._num_cached[0] -= 1
    pool.blocks.prefix_map._num_cached.append(1)


COOKED: dict[str, tuple[Cook, str]] = {
    "held by no table": (lambda pool, _: pool.blocks.touch(GroupId(0), [BlockId(7)]), "free"),
    "counted twice": (lambda pool, _: pool.blocks.touch(GroupId(0), [BlockId(1)]), "block 1: ref_cnt 2, in 1 tables"),
    "leaked": (lambda pool, _: pool.blocks.get_new_blocks(GroupId(0), 1), "free"),
    "freed under a table": (lambda pool, _: pool.blocks.free_blocks(GroupId(0), [BlockId(4)]), "free"),
    "free though held": (lambda pool, _: pool.blocks.free_list.append([BlockId(2)]), "free"),
    "cached by no session": (cook_hash_of_nobody, "pending"),
    "computed without room": (cook_computed_without_room, "computed tokens without slots"),
    "null block in a table": (cook_null_block_in_a_table, r"free \+ 3 used \+ 1 null"),
    "more cached than held": (cook_more_cached_than_held, "more cached than held"),
    "hash missing": (lambda _, session: session.by_number[RequestNumber(1)].hashes.pop(), "2 hashes, not 3"),
    "used counted wrong": (cook_used_blocks, "group 0: counts 5 used, not 4"),
    "evicted counted wrong": (cook_evicted_blocks, "evicted more blocks than the pool"),
    "cached counted in another group": (cook_cached_blocks, "group 0: cached miscounted"),
    "number missing": (lambda _, session: session.by_number.clear(), "by id and by number"),
}


@pytest.mark.parametrize("case", COOKED)
def test_cooked_books_are_found(case: str, world: World) -> None:
    cook, message = COOKED[case]
    check_integrity(world.pool, world.sessions())
    cook(world.pool, world.sessions()[0])
    with pytest.raises(IntegrityError, match=message):
        check_integrity(world.pool, world.sessions())


def test_a_session_left_out_is_missed(world: World) -> None:
    with pytest.raises(IntegrityError):
        check_integrity(world.pool, [])


def cook_counted_blocks(world: World, session: Session) -> None:
    del world
    assert session.holding
    session.holding.counts[BlockId(8)] = 1


def cook_uncovered(world: World, session: Session) -> None:
    del world
    assert session.holding
    session.holding.uncovered[BlockId(1)] = None


def cook_minima(world: World, _: Session) -> None:
    world.pool.quotas.min_blocks += 1


def cook_covering(world: World, _: Session) -> None:
    world.pool.quotas.num_covering[BlockId(1)] += 1


def cook_only_covered(world: World, _: Session) -> None:
    world.pool.quotas._num_only_covered -= 1


def cook_maximum(world: World, session: Session) -> None:
    del world
    assert session.holding
    session.holding.max_blocks = 2


@pytest.mark.parametrize(
    ("cook", "found"),
    [
        (cook_counted_blocks, "held and counted blocks differ"),
        (cook_uncovered, "covers 2 blocks"),
        (cook_minima, "minima of 3, 4 are counted"),
        (cook_covering, "covering tables"),
        (cook_only_covered, "only in covering tables"),
        (cook_maximum, "more than its maximum"),
    ],
)
def test_cooked_quotas(cook: Callable[[World, Session], None], found: str) -> None:
    world = World(num_blocks=9)
    session = world.open(quota=Quota(3, 5))
    world.admit(session, 1, "abc", 13)
    check_integrity(world.pool, world.sessions())
    cook(world, session)
    with pytest.raises(IntegrityError, match=found):
        check_integrity(world.pool, world.sessions())


def test_an_integrity_error_is_not_a_kvpool_error() -> None:
    assert not issubclass(IntegrityError, KvpoolError)
