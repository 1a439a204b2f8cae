"""Tests of core/snapshots.py and of the parts of the core that make snapshots."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from kvpool.core import snapshots
from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.commands import FreePart
from kvpool.core.ids import (
    MAX_BLOCKS,
    NULL_BLOCK,
    BlockHash,
    BlockId,
    GroupId,
    MapId,
    RequestId,
    RequestNumber,
    SessionNumber,
    StepNumber,
)
from kvpool.core.sessions.request import BlockTable, Request
from kvpool.core.sessions.session import Session
from kvpool.core.snapshots import Column, ColumnCopy
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.state import State
from kvpool.core.steps.columns import Operation
from support.core import World, block_hashes, config
from support.journal import Traffic, assert_alike
from support.state import DrivenState, restored


@pytest.fixture(autouse=True)
def _short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SLICE_LENGTH", 7)


def test_a_column_is_read_in_slices() -> None:
    assert list(Column(iter(range(8)), 3).slices()) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert list(map(len, Column(range(20)).slices())) == [7, 7, 6]


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_shows_the_list_before_later_changes(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a workload
    values = [rng.choice([None, 1, 2, 3]) for _ in range(rng.randrange(60))]
    before, copied = values.copy(), ColumnCopy(values)
    read: list[int | None] = []

    def change() -> None:
        indices = [rng.randrange(len(values)) for _ in range(rng.randrange(9))] if values else []
        copied.before_change(indices)
        for i in indices:
            values[i] = rng.choice([None, 4, 5])

    change()
    for value in copied:
        read.append(value)
        change()
    assert read == before


def test_a_request_is_copied_as_it_was() -> None:
    table = BlockTable([BlockId(1), BlockId(2)], 1, 0)
    skipping = BlockTable([NULL_BLOCK, BlockId(3), BlockId(4)], 2, 1)
    request = Request(RequestId("r"), RequestNumber(1), SessionNumber(1), (table, skipping), num_tokens=9)
    request.hashes, request.token_ids, request.last_hashes = [BlockHash(b"a")] * 2, [1, 2], {2: [BlockHash(b"aa")]}
    make = request.freeze()
    request.num_tokens = 99
    request.hashes += [BlockHash(b"b")]
    request.token_ids += [3]
    request.last_hashes[2].append(BlockHash(b"bb"))
    request.last_hashes[4] = []
    table.block_ids.append(BlockId(5))
    skipping.block_ids[1] = NULL_BLOCK
    skipping.num_skipped = 2
    skipping.block_ids.append(BlockId(6))
    was = make()
    assert (was.request_id, was.num_tokens) == ("r", 9)
    assert (was.hashes, was.token_ids, was.last_hashes) == ([b"a"] * 2, [1, 2], {2: [b"aa"]})
    held = [(each.block_ids, each.num_cached, each.num_skipped) for each in was.tables]
    assert held == [([1, 2], 1, 0), ([0, 3, 4], 2, 1)]


def test_the_cache_is_reset_several_times_while_a_snapshot_is_read() -> None:
    prefix_map, blocks = PrefixMap(4, 2, 4), [BlockId(1), BlockId(2)]
    prefix_map.insert(MapId(0), blocks, [BlockHash(b"a"), BlockHash(b"b")], SessionNumber(1), StepNumber(1))
    snapshot = prefix_map.snapshot()
    for number in (7, 8, 9):
        prefix_map.clear()
        prefix_map.insert(MapId(1), blocks, [BlockHash(b"x"), BlockHash(b"y")], SessionNumber(number), StepNumber(1))
    assert list(snapshot.block_hashes.values) == [None, b"a", b"b", None]
    assert list(snapshot.map_ids.values) == [0, 0, 0, 0]
    assert list(snapshot.session_numbers.values) == [0, 1, 1, 0]


def test_only_one_snapshot_is_read_at_a_time() -> None:
    state = State()
    with state.snapshot():
        with pytest.raises(RuntimeError), state.snapshot():
            pass
        with pytest.raises(RuntimeError), state.snapshot():
            pass
    with state.snapshot():
        pass


@pytest.mark.parametrize("part", ["column", "chunk_entries"])
def test_parts_that_do_not_belong_together_are_refused(part: str) -> None:
    state = DrivenState()
    blocks = state.create_pool(config(30), b"n" * 32)[0].blocks
    blocks.free_blocks(GroupId(0), blocks.get_new_blocks(GroupId(0), 5))
    with state.snapshot() as snapshot:
        (pool,) = snapshot.pools
        values = list(getattr(pool.blocks.free_list, part).values)[:-1]
        changes: dict[str, Any] = {part: Column(values)}
        free_list = replace(pool.blocks.free_list, **changes)
        spoiled = replace(snapshot, pools=[replace(pool, blocks=replace(pool.blocks, free_list=free_list))])
    with pytest.raises((ValueError, LookupError)):
        State().restore(spoiled)


@pytest.mark.parametrize("num_blocks", [29, MAX_BLOCKS])
def test_a_snapshot_with_the_blocks_of_another_pool_is_refused(num_blocks: int) -> None:
    state = DrivenState()
    state.create_pool(config(30), b"n" * 32)
    with state.snapshot() as snapshot:
        (pool,) = snapshot.pools
        spoiled = replace(snapshot, pools=[replace(pool, config=replace(pool.config, num_blocks=num_blocks))])
    with pytest.raises(ValueError, match=r"blocks of (pool|the free list)"):
        State().restore(spoiled)


def busy(state: DrivenState, pool_config: PoolConfig, seed: int) -> None:
    """Changes a state at random."""
    traffic = Traffic(state, pool_config, seed)
    for _ in range(40):
        traffic.change()


def test_a_state_that_is_replaced_is_the_other_one_in_the_same_objects() -> None:
    state, other = DrivenState(), DrivenState()
    for each, seed in ((state, 1), (other, 2)):
        busy(each, config(30, enable_events=True), seed)
    other.drain(None)
    other.lose_sessions()
    expected = restored(other)
    pools, sessions, lifetimes = state.pools, state.sessions, state.new_block_lifetimes
    state.replace(other)
    assert_alike(expected, state)
    assert (state.pools, state.sessions, state.new_block_lifetimes) == (pools, sessions, lifetimes)
    assert None in state.pools.drained
    assert state.lost_may_run
    (pool,) = state.pools
    state.undrain(None)
    state.reset_prefix_cache(pool)
    assert_alike(state, state)


def test_a_state_can_be_replaced_while_a_snapshot_of_it_is_read() -> None:
    state, before, other = DrivenState(), DrivenState(), DrivenState()
    for each, seed in ((state, 1), (before, 1), (other, 2)):
        busy(each, config(30), seed)
    read = DrivenState()
    with state.snapshot() as snapshot:
        state.replace(other)
        read.restore(snapshot)
    assert_alike(before, read)
    assert_alike(state, restored(state))


CHANGES: dict[str, Callable[[World, Session], object]] = {
    "a step": lambda world, session: world.run(
        session,
        Operation.ALLOCATE, Operation.PREEMPT, Operation.APPEND, Operation.FREE, Operation.ADMIT,
        request_numbers=[1, 2, 3, 4, 6], request_ids=["r4"], declares=[0, 0, 0, 0, 1],
        num_new_tokens=[4, 0, 0, 0, 0], num_appended_tokens=[4, 0, 4, 0, 1], block_hashes=block_hashes("zy", 2),
    ),
    "a request that replaces another": lambda world, session: (world.free(session, 1), world.admit(session, 1, "z", 4)),
    "a close": lambda world, session: world.allocator.close_session(session.session_id, 0.0),
    "parts of a close": lambda world, session: [
        world.allocator.execute(FreePart(session.session_id), 0.0) for _ in ("pending blocks", "requests")
    ],
    "an end": lambda world, _: world.allocator.evict_session("m", 1, 0.0),
    "a quarantine that ends": lambda world, _: (
        world.allocator.evict_session("m", 1, 0.0, quarantine_seconds=1.0), world.allocator.end_due_quarantines(2.0),
    ),
    "other weights": lambda world, session: world.allocator.set_weights_version(session, "2"),
    "an epoch": lambda world, _: world.allocator.pass_epoch(world.pool, 2),
}  # fmt: skip


@pytest.mark.parametrize("num_read", [0, 3, 6])
@pytest.mark.parametrize("change", CHANGES)
def test_requests_are_read_as_they_were_before_a_change(change: str, num_read: int) -> None:
    world = World(40)
    session, other = world.open(), world.open()
    for number, content in enumerate(("abcde", "abcfg", "hijkl", "mn", "op"), 1):
        world.admit(session, number, content, 4 * len(content) - 1)
    world.admit(other, 1, "q", 3)
    expected, read = DrivenState(), DrivenState()
    with world.allocator.snapshot() as snapshot:
        expected.restore(snapshot)
    with world.allocator.snapshot() as snapshot:
        (pool,) = snapshot.pools
        left = iter(pool.requests.values)
        requests = list(islice(left, num_read))
        CHANGES[change](world, session)
        requests += left
        read.restore(replace(snapshot, pools=[replace(pool, requests=Column(requests))]))
    assert_alike(expected, read)
    assert not any(each.requests_copy for each in world.sessions())
