import pytest

from kvpool.core.errors import UnavailableError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.pools.drain_state import DRAINED_RETRY_SECONDS, Intake
from kvpool.core.ranks.messages import PoolState
from support.core import World

A, B = PoolName("a"), PoolName("b")


def test_a_pool_takes_sessions_when_neither_it_nor_the_server_is_drained() -> None:
    intake = Intake()
    intake.close(A)
    assert (intake.takes(A), intake.takes(B)) == (False, True)
    intake.close(None)
    assert (intake.takes(A), intake.takes(B)) == (False, False)
    intake.open(None)
    assert (intake.takes(A), intake.takes(B)) == (False, True)
    intake.open(A)
    assert intake.takes(A)


def test_a_refusal_says_what_is_drained_and_when_to_try_again() -> None:
    intake = Intake()
    intake.close(A)
    with pytest.raises(UnavailableError, match="pool 'a' is drained") as refused:
        intake.check(A)
    assert (refused.value.reason, refused.value.retry_seconds) == ("DRAINED", DRAINED_RETRY_SECONDS)
    intake.close(None)
    with pytest.raises(UnavailableError, match="the server is drained"):
        intake.check(B)


def test_a_drained_pool_lets_open_sessions_go_on_and_refuses_new_ones_changing_nothing() -> None:
    world = World()
    session = world.open()
    world.allocator.intake.close(world.pool.config.name)
    before = (world.snapshot(), repr(world.pool.activity))
    with pytest.raises(UnavailableError, match="drained"):
        world.open()
    assert (world.snapshot(), repr(world.pool.activity)) == before
    assert world.allocator.describe(world.pool).state is PoolState.DRAINING
    world.admit(session, 1, "abc", 12)
    world.allocator.session(session.session_id, 1.0)
    assert world.allocator.close_session(session.session_id, 1.0)[1] == 1
    world.allocator.intake.open(world.pool.config.name)
    assert world.allocator.describe(world.pool).state is PoolState.READY
    assert world.open().session_id == SessionId("s3")
