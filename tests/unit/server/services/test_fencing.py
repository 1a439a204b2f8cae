"""Tests of services/fencing.py."""

import pytest

from kvpool.server.services.fencing import Fencing
from support.core import World

QUARANTINE_SECONDS = 5.0


@pytest.fixture
def world() -> World:
    return World(num_blocks=9)


def test_a_session_is_killed_until_its_quarantine_has_ended(world: World) -> None:
    session = world.open()
    world.admit(session, 1, "abc", 13)
    world.open()
    world.allocator.evict_session("m", session.session_number, 0.0, quarantine_seconds=QUARANTINE_SECONDS)
    fencing = Fencing()
    fencing.kill(world.pool.config.name, session.session_number)
    assert fencing.take_killed(world.pool) == [1]
    assert fencing.take_killed(world.pool) == [1], "until its quarantine has ended"
    world.allocator.end_due_quarantines(QUARANTINE_SECONDS)
    assert fencing.take_killed(world.pool) == [1], "whatever happened since the last fence"
    assert fencing.take_killed(world.pool) == []


def test_processes_of_a_session_without_blocks_are_killed_once(world: World) -> None:
    session = world.open()
    fencing = Fencing()
    fencing.kill(world.pool.config.name, session.session_number)
    assert fencing.take_killed(world.pool) == [1]
    assert fencing.take_killed(world.pool) == []
