"""Rule 4 of prefix_map: sessions find cached blocks only of sessions with an equal namespace."""

import sys
from typing import Any

import pytest

from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.events import BlockRemoved
from kvpool.core.ids import BlockHash, BlockId, MapId, SessionNumber, StepNumber
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation, Outcome
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from support.core import World, block_hashes, config
from support.integrity import check_integrity
from support.journal import Traffic, assert_alike
from support.state import DrivenState, restored

FULL, WINDOW = FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=5)
NUM_MANY = 260


def cached(world: World, namespace: bytes, content: str = "abc") -> Session:
    """A session that has cached a prompt and freed it."""
    session = world.open(namespace=namespace)
    world.admit(session, 1, content, 4 * len(content) + 1)
    world.run(session, Operation.FREE, executed=session.sequence, request_numbers=[1])
    return session


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)])
@pytest.mark.parametrize(("owner", "reader"), [(b"one", b"two"), (b"", b"one"), (b"one", b"")])
def test_an_equal_hash_finds_nothing_in_another_namespace(owner: bytes, reader: bytes, specs: Any) -> None:
    world = World(specs=specs)
    cached(world, owner)
    assert world.num_found(world.open(namespace=reader), "abc") == 0
    assert world.num_found(world.open(namespace=owner), "abc") == 12


def test_a_hit_of_another_namespace_is_not_allocated(world: World) -> None:
    """A session that learned hashes and block ids names them as its hit."""
    cached(world, b"one")
    thief = world.open(namespace=b"two")
    result = world.declare(
        thief, Operation.ALLOCATE, 1, "abc", 13, num_new_tokens=[1], num_block_ids=[3], block_ids=[1, 2, 3]
    )
    assert (result.outcomes, result.num_hit_tokens) == ([Outcome.HIT_CHANGED], [])


def test_each_namespace_has_its_copy_and_loses_it_alone(world: World) -> None:
    for namespace in (b"", b"one", b"two"):
        cached(world, namespace)
    readers = [world.open(namespace=namespace) for namespace in (b"", b"one", b"two")]
    prefix_map = world.pool.blocks.prefix_map
    assert len(prefix_map) == 9
    owned = [b for b in map(BlockId, range(20)) if prefix_map.block_hash(b) and prefix_map.map_id(b) == 1]
    world.run(readers[0], Operation.EVICT, num_block_ids=[3], block_ids=owned)
    assert [world.num_found(reader, "abc") for reader in readers] == [12, 0, 12]
    assert world.pool.reset_prefix_cache()
    assert [world.num_found(reader, "abc", 10) for reader in readers] == [0, 0, 0]
    cached(world, b"one")
    assert [world.num_found(reader, "abc", 11) for reader in readers] == [0, 12, 0]


def test_watchers_see_all_namespaces_as_one_set() -> None:
    """An event names no namespace: it says how many blocks of any namespace still have the hash."""
    world = World(enable_events=True)
    for namespace in (b"", b"one"):
        session = world.open(namespace=namespace)
        world.admit(session, 1, "ab", 9, executed=0, token_ids=list(range(9)))
    stored = SnapshotCursor(world.pool).next_chunk(100)
    assert [list(run.block_hashes) for run in stored] == [
        [BlockHash(block_hashes("ab", 2)[at : at + 32]) for at in (0, 32)] for _ in range(2)
    ]
    world.pool.blocks.take_events()
    world.pool.blocks.evict_blocks([BlockId(1), BlockId(4)])
    removed = [event for event in world.pool.blocks.take_events() if isinstance(event, BlockRemoved)]
    assert [event.copies_left for event in removed] == [1, 0]


def test_events_of_removals_take_as_many_calls_with_many_scopes() -> None:
    num_calls = []
    for num_scopes in (1, 100):
        world = World(30, enable_events=True)
        for i in range(num_scopes):
            session = world.open(namespace=b"%d" % i)
        world.admit(session, 1, "abcdefghij", 40, executed=0, token_ids=list(range(40)))
        counted: list[object] = []
        sys.setprofile(lambda *event, counted=counted: counted.append(event))
        world.pool.blocks.evict_blocks(list(map(BlockId, range(1, 11))))
        sys.setprofile(None)
        assert sum(isinstance(event, BlockRemoved) for event in world.pool.blocks.take_events()) == 10
        num_calls.append(len(counted))
    assert num_calls[0] == num_calls[1]


def test_an_unused_namespace_is_dropped_when_another_is_opened() -> None:
    prefix_map = PrefixMap(num_columns=10, num_groups=2, num_blocks=10)
    first_maps = {prefix_map.open_scope((bytes([i, 1]), ""), ()) for i in range(100)}
    assert first_maps == {2}
    kept, used = prefix_map.open_scope((b"kept", ""), ()), (b"used", "")
    prefix_map.insert(MapId(kept + 1), [BlockId(3)], [BlockHash(b"h")], SessionNumber(1), StepNumber(1))
    in_use = prefix_map.open_scope(used, ())
    others = {prefix_map.open_scope((bytes([i, 2]), ""), {used}) for i in range(100)}
    assert len({0, kept, in_use} | others) == 4
    assert (prefix_map.open_scope((b"kept", ""), ()), prefix_map.open_scope(used, ())) == (kept, in_use)
    prefix_map.remove(BlockId(3))
    assert prefix_map.open_scope((b"next", ""), {used}) in {kept, *others}


def test_more_namespaces_than_a_byte_counts() -> None:
    """The column of maps grows wider, also while a snapshot is read."""
    world = World(num_blocks=2 * NUM_MANY)
    cached(world, b"0")
    with world.allocator.snapshot() as snapshot:
        for i in range(1, NUM_MANY):
            world.allocator.close_session(cached(world, str(i).encode(), "a").session_id, 0.0)
        earlier = DrivenState()
        earlier.restore(snapshot)
    assert len(earlier.pools.get("m").blocks.prefix_map) == 3
    assert_alike(world.allocator, restored(world.allocator))
    for i in (0, 1, 255, 256, NUM_MANY - 1):
        assert world.num_found(world.open(namespace=str(i).encode()), "a") == 4
    assert world.num_found(world.open(), "a") == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)])
def test_a_namespace_separates_as_other_hashes_do(seed: int, specs: Any) -> None:
    """Namespaces with equal hashes give the same answers, blocks and counts as one namespace with salted hashes."""
    made = config(30, specs=specs)
    mine, theirs = Traffic(DrivenState(), made, seed), Traffic(DrivenState(), made, seed, salts_hashes=True)
    for _ in range(400):
        assert mine.change() == theirs.change()
        pools = [traffic.allocator.pools.get("m") for traffic in (mine, theirs)]
        assert len({repr((pool.stats, pool.activity, list(pool.blocks.free_list))) for pool in pools}) == 1
    check_integrity(pools[0], list(pools[0].sessions.values()))
    assert pools[0].stats.hits_tokens
