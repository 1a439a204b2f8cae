"""Leases, ended sessions, events and the integrity check, in explicit time."""

import pytest

from kvpool.core.errors import AbortedError, NotFoundError
from kvpool.core.events import BlockRemoved, BlockStored
from kvpool.core.sessions.session import Session
from support.core import World, opened
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


def test_events_report_stored_and_removed_blocks() -> None:
    world, session = opened(enable_events=True)
    step_tokens = list(range(8))
    world.admit(session, 1, "ab", 8, token_ids=step_tokens, lora_names=["l"])
    (stored,) = world.pool.blocks.take_events()
    assert isinstance(stored, BlockStored)
    assert (list(stored.token_ids), stored.lora_name, len(stored.block_hashes)) == (list(step_tokens), "l", 2)
    world.allocator.expire(10.0)
    assert [type(event) for event in world.pool.blocks.take_events()] == [BlockRemoved, BlockRemoved]
