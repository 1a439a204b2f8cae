import pytest

from kvpool.core.errors import UnavailableError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.pools.registry import DRAINED_RETRY_SECONDS, PoolRegistry
from kvpool.core.ranks.messages import PoolState
from support.core import opened

A, B = PoolName("a"), PoolName("b")


def test_a_pool_accepts_sessions_if_neither_it_nor_the_server_is_drained() -> None:
    pools = PoolRegistry()
    pools.drained.add(A)
    assert (pools.accepts_sessions(A), pools.accepts_sessions(B)) == (False, True)
    pools.drained.add(None)
    assert (pools.accepts_sessions(A), pools.accepts_sessions(B)) == (False, False)
    pools.drained.discard(None)
    assert (pools.accepts_sessions(A), pools.accepts_sessions(B)) == (False, True)
    pools.drained.discard(A)
    assert pools.accepts_sessions(A)


def test_a_refusal_names_the_drained_pool_or_server_and_the_retry_time() -> None:
    pools = PoolRegistry()
    pools.drained.add(A)
    with pytest.raises(UnavailableError, match="pool 'a' is drained") as refused:
        pools.check_accepts_sessions(A)
    assert (refused.value.reason, refused.value.retry_seconds) == ("DRAINED", DRAINED_RETRY_SECONDS)
    pools.drained.add(None)
    with pytest.raises(UnavailableError, match="the server is drained"):
        pools.check_accepts_sessions(B)


def test_a_drained_pool_serves_open_sessions_and_refuses_new_ones_without_a_change() -> None:
    world, session = opened()
    world.allocator.pools.drained.add(world.pool.config.name)
    before = (world.snapshot(), repr(world.pool.activity))
    with pytest.raises(UnavailableError, match="drained"):
        world.open()
    assert (world.snapshot(), repr(world.pool.activity)) == before
    assert world.allocator.pools.state_of(world.pool) is PoolState.DRAINING
    world.admit(session, 1, "abc", 12)
    world.allocator.sessions.find(session.session_id, 1.0)
    assert world.allocator.close_session(session.session_id, 1.0)[1] == 1
    world.allocator.pools.drained.discard(world.pool.config.name)
    assert world.allocator.pools.state_of(world.pool) is PoolState.READY
    assert world.open().session_id == SessionId("s3")
