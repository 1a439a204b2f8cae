"""Leases, ended sessions, events and the integrity check, in explicit time."""

import pytest

from kvpool.core.blocks.integrity import IntegrityError
from kvpool.core.errors import AbortedError, NotFoundError
from kvpool.core.events import BlockRemoved, BlockStored
from kvpool.core.ids import BlockId, GroupId
from kvpool.core.sessions.session import Session
from kvpool.core.specs.pool_config import ReuseOrder
from support.core import World, opened
from support.integrity import check_integrity
from support.refusals import refused


def test_a_call_renews_the_lease(world: World) -> None:
    session = world.open(lease_seconds=5.0)
    for now_seconds in (4.0, 8.0, 12.9):
        assert world.allocator.touch_session(session.session_id, now_seconds)[1] is session
    assert world.allocator.next_expiry_seconds() == 17.9
    assert world.allocator.expire(17.8) == []
    assert [expired for _, expired, _ in world.allocator.expire(17.9)] == [session]


def test_an_expired_session_is_distinguished_from_an_unknown_one(world: World, session: Session) -> None:
    for _ in range(2):  # before and after its blocks are freed
        with refused(AbortedError, reason="LEASE_EXPIRED"):
            world.allocator.sessions.find(session.session_id, 10.0)
        world.allocator.expire(10.0)
    with pytest.raises(NotFoundError):
        world.allocator.sessions.find("never", 10.0)
    assert world.sessions() == []


def test_an_open_stream_keeps_a_session_alive(world: World, session: Session) -> None:
    session.open_streams = 1
    assert world.allocator.expire(1e9) == []
    assert world.allocator.next_expiry_seconds() == float("inf")


def test_requests_of_an_expired_session_are_freed_the_oldest_first_and_each_from_its_tail() -> None:
    world, session = opened(num_blocks=8, enable_caching=False, reuse_order=ReuseOrder.LRU)
    world.admit(session, 1, "", 9)
    world.admit(session, 2, "", 5)
    assert [count for _, _, count in world.allocator.expire(10.0)] == [2]
    assert list(world.pool.blocks.free_list) == [6, 7, 3, 2, 1, 5, 4]


def test_events_report_stored_and_removed_blocks() -> None:
    world, session = opened(enable_events=True)
    step_tokens = list(range(8))
    world.admit(session, 1, "ab", 8, token_ids=step_tokens, lora_names=["l"])
    (stored,) = world.pool.blocks.take_events()
    assert isinstance(stored, BlockStored)
    assert (list(stored.token_ids), stored.lora_name, len(stored.block_hashes)) == (list(step_tokens), "l", 2)
    world.allocator.expire(10.0)
    assert [type(event) for event in world.pool.blocks.take_events()] == [BlockRemoved, BlockRemoved]


def test_the_integrity_check_finds_inconsistencies(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    world.pool.blocks.touch(GroupId(0), [BlockId(1)])
    with pytest.raises(IntegrityError, match="block 1: ref_cnt 2, in 1 tables"):
        check_integrity(world.pool, world.sessions())
    world.pool.blocks.free_blocks(GroupId(0), [BlockId(1)])
    world.pool.blocks.get_new_blocks(GroupId(0), 1)
    with pytest.raises(IntegrityError, match="free"):
        check_integrity(world.pool, world.sessions())
