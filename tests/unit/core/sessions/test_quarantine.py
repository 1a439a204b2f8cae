"""Rules of quarantine, by number."""

import pytest

from kvpool.core.blocks.integrity import IntegrityError
from kvpool.core.errors import NotFoundError, WrongStateError
from kvpool.core.ids import BlockId, SessionNumber
from kvpool.core.sessions.quarantine import Quarantined
from kvpool.core.sessions.session import Session
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.columns import Operation, Outcome
from support.core import World, config, opened
from support.integrity import check_integrity

LEASE_SECONDS = 10.0
QUARANTINE_SECONDS = 5.0
NEVER = float("inf")


@pytest.fixture
def world() -> World:
    return World(num_blocks=9)


def expire(world: World) -> None:
    """Lets all leases expire, at time 10."""
    world.now_seconds += LEASE_SECONDS
    world.allocator.expire(world.now_seconds, quarantine_seconds=QUARANTINE_SECONDS)


def fence(world: World) -> None:
    """Opens the pool again, with ranks that answer fences."""
    world.allocator.pass_epoch(world.pool, 2)
    world.allocator.open_epoch(config(9), b"n" * 32, 3, ranks_fence=True)


def quarantined(world: World) -> tuple[int, int]:
    info = world.info()
    assert info.quarantined_blocks <= info.config.num_blocks - 1 - info.free_blocks
    return info.quarantined_sessions, info.quarantined_blocks


def released(world: World, now_seconds: float) -> list[SessionNumber]:
    return [each.session.session_number for _, each in world.allocator.end_due_quarantines(now_seconds)]


def test_rule_1_blocks_of_an_expired_session_are_not_allocated(world: World) -> None:
    world.admit(world.open(), 1, "abc", 13)
    expire(world)
    assert quarantined(world) == (1, 4)
    other = world.open()
    assert world.admit(other, 1, "vwxyz", 17).outcomes == [Outcome.NO_BLOCKS]
    assert set(world.admit(other, 2, "vwxy", 16).block_ids) == {5, 6, 7, 8}


def test_rule_1_published_blocks_can_be_hit_and_others_are_withdrawn(world: World, one: Session) -> None:
    world.admit(one, 1, "abc", 13)
    world.run(one, executed=1)
    world.admit(one, 2, "xy", 9)
    expire(world)
    other = world.open()
    assert world.admit(other, 1, "abc", 13).num_hit_tokens == [12]
    assert world.admit(other, 2, "xy", 9).num_hit_tokens == []
    assert released(world, 15.0) == [one.session_number]
    assert [world.pool.blocks.ref_cnt(BlockId(b)) for b in (1, 2, 3, 4)] == [1, 1, 1, 0]


def test_rule_2_without_ranks_blocks_are_freed_when_their_time_has_passed(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    expire(world)
    assert world.allocator.next_expiry_seconds() == 15.0
    assert released(world, 14.9) == []
    assert released(world, 15.0) == [session.session_number]
    assert quarantined(world) == (0, 0)
    assert world.pool.blocks.usage == 0.0
    assert world.allocator.next_expiry_seconds() == NEVER


def test_rule_2_on_another_clock_the_full_wait_restarts(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    expire(world)
    world.allocator.renew_leases(3.0)
    assert released(world, 7.9) == []
    assert released(world, 8.0) == [session.session_number]


def test_rule_2_with_fencing_ranks_no_time_frees_blocks(world: World) -> None:
    fence(world)
    one, two = world.open(), world.open()
    for session in (one, two):
        world.admit(session, 1, "ab", 8)
    expire(world)
    assert world.pool.quarantine.awaiting_ranks == [one.session_number, two.session_number]
    assert world.allocator.next_expiry_seconds() == NEVER
    assert released(world, 1e9) == []
    found = world.allocator.end_quarantine("m", [two.session_number, SessionNumber(100)])
    assert [each.session.session_number for each in found] == [two.session_number]
    assert quarantined(world) == (1, 2)
    assert world.allocator.end_quarantine("m", [two.session_number]) == []


def test_rule_2_zero_quarantine_seconds_frees_at_once_unless_ranks_fence(world: World) -> None:
    for blocks in (0, 4):
        session = world.open()
        world.admit(session, 1, "abc", 13)
        world.allocator.evict_session("m", session.session_number, world.now_seconds)
        assert quarantined(world) == (int(blocks > 0), blocks)
        if not blocks:
            fence(world)


def test_rule_2_a_new_epoch_drops_the_quarantine(world: World) -> None:
    world.admit(world.open(), 1, "abc", 13)
    expire(world)
    world.allocator.pass_epoch(world.pool, 2)
    assert quarantined(world) == (0, 0)
    assert world.pool.blocks.usage == 0.0


def test_rule_3_a_session_without_blocks_is_not_quarantined(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    world.run(session, Operation.PREEMPT, request_numbers=[1])
    expire(world)
    assert quarantined(world) == (0, 0)


def test_rule_4_blocks_are_freed_as_when_a_session_closes() -> None:
    orders = []
    for quarantine_seconds in (0.0, QUARANTINE_SECONDS):
        world, session = opened(num_blocks=8, enable_caching=False, reuse_order=ReuseOrder.LRU)
        world.admit(session, 1, "", 9)
        world.admit(session, 2, "", 5)
        world.allocator.expire(LEASE_SECONDS, quarantine_seconds=quarantine_seconds)
        world.allocator.end_due_quarantines(LEASE_SECONDS + QUARANTINE_SECONDS)
        orders.append(list(world.pool.blocks.free_list))
    assert orders[0] == orders[1] == [6, 7, 3, 2, 1, 5, 4]


def test_a_session_that_closes_is_not_quarantined(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    world.allocator.close_session(session.session_id, 0.0)
    assert (quarantined(world), world.pool.blocks.usage) == ((0, 0), 0.0)


def test_blocks_shared_by_ended_sessions_count_once(world: World) -> None:
    one, two = world.open(), world.open()
    world.admit(one, 1, "abc", 13)
    world.run(one, executed=1)
    world.admit(two, 1, "abc", 13)
    expire(world)
    assert quarantined(world) == (2, 5)


def test_the_prefix_cache_is_not_reset_during_a_quarantine(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    world.run(session, executed=1)
    expire(world)
    before = world.snapshot()
    assert not world.pool.reset_prefix_cache()
    assert world.snapshot() == before
    released(world, 15.0)
    assert world.pool.reset_prefix_cache()


def test_a_pool_is_not_removed_during_a_quarantine(world: World) -> None:
    """Another pool of the same name would allocate the same blocks of the same tensors to other sessions."""
    world.admit(world.open(), 1, "abc", 13)
    expire(world)
    with world.refuses(WrongStateError, reason="POOL_IN_USE", match="quarantine: 1"):
        world.allocator.remove_pool("m")
    released(world, 15.0)
    world.allocator.remove_pool("m")
    with pytest.raises(NotFoundError):
        world.allocator.end_quarantine("m", [])


def test_the_integrity_check_finds_a_wrong_quarantine(world: World) -> None:
    world.admit(world.open(), 1, "abc", 13)
    expire(world)
    world.pool.quarantine.add(Quarantined(world.open(), 0.0, NEVER, []))
    with pytest.raises(IntegrityError, match="session 2 is in quarantine without blocks"):
        check_integrity(world.pool, world.sessions())
    world.pool.quarantine.clear()
    with pytest.raises(IntegrityError, match="free"):
        check_integrity(world.pool, world.sessions())
