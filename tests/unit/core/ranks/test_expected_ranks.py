"""Ranks that count as present without a stream: their server was replaced, or could not answer them."""

from dataclasses import replace
from itertools import count

from kvpool.core.errors import UnavailableError
from kvpool.core.ids import PoolName
from kvpool.core.ranks.effects import EpochPassed, PoolSuspended
from kvpool.core.ranks.membership import Membership
from kvpool.core.ranks.messages import HeldTensors, LinkId, PoolState, Rank, RankState, Ready
from support.ranks import TIMING, Gathering, registration


def taken_over() -> Gathering:
    """Two ranks whose server was replaced just now."""
    before, after = Gathering(), Gathering()
    before.form()
    links = map(LinkId, count(100))
    after.members = Membership(PoolName("m"), TIMING)
    after.members.restore(before.members.rank_group(), links, after.now_seconds, expects_ranks=True)
    after.epoch, after.is_serving = before.epoch, True
    return after


def returning(gathering: Gathering, rank: int) -> LinkId:
    members = gathering.members
    said = replace(registration(), world_size=2, rank=Rank(rank), boot_id=f"process-{rank}")
    return gathering.register(replace(said, held=HeldTensors(members.epoch, 100), last_epoch=members.epoch))


def test_the_pool_serves_while_its_ranks_register_again() -> None:
    after = taken_over()
    assert after.members.state is PoolState.READY
    links = [returning(after, 0), returning(after, 1)]
    assert all(isinstance(after.last(link), Ready) for link in links)
    assert after.members.state is PoolState.READY
    assert not after.pool
    assert not any(member.is_expected for member in after.members.registry)


def test_a_rank_that_does_not_return_is_lost_after_the_heartbeat_timeout() -> None:
    after = taken_over()
    link = returning(after, 0)
    after.wait(TIMING.heartbeat_timeout_seconds * 0.9)
    after.beat(link)
    assert after.members.state is PoolState.READY
    after.wait(TIMING.heartbeat_timeout_seconds * 0.2)
    assert [type(effect) for effect in after.pool] == [PoolSuspended]
    assert after.rank_states == [RankState.READY, RankState.LOST]
    returning(after, 1)
    assert after.members.state is PoolState.READY


def test_the_epoch_passes_when_the_grace_time_of_a_missing_rank_is_over() -> None:
    after = taken_over()
    link = returning(after, 0)
    epoch = after.members.epoch
    for _ in range(int((TIMING.heartbeat_timeout_seconds + TIMING.grace_seconds) / TIMING.heartbeat_seconds) + 2):
        after.wait(TIMING.heartbeat_seconds)
        after.beat(link)
    assert EpochPassed(epoch + 1) in after.pool


def test_another_process_may_not_take_the_place_of_an_expected_rank() -> None:
    after = taken_over()
    with after.refuses(UnavailableError, match="may return"):
        after.register(replace(registration(), world_size=2, rank=Rank(1), boot_id="another-process"))


def test_a_rank_that_left_without_answers_counts_as_present_until_it_returns() -> None:
    gathering = Gathering()
    first, _ = gathering.form()
    gathering.pool.clear()
    gathering.wait(TIMING.heartbeat_timeout_seconds * 0.9)
    gathering.break_link(first, is_expected=True)
    gathering.members.excuse(gathering.now_seconds)
    gathering.wait(TIMING.heartbeat_timeout_seconds * 0.9)
    again = returning(gathering, 0)
    assert isinstance(gathering.last(again), Ready)
    assert not gathering.pool
    assert not any(member.is_expected for member in gathering.members.registry)


def test_a_rank_that_left_without_answers_and_died_is_lost_after_the_heartbeat_timeout() -> None:
    gathering = Gathering()
    first, second = gathering.form()
    gathering.pool.clear()
    gathering.break_link(first, is_expected=True)
    gathering.wait(TIMING.heartbeat_timeout_seconds * 0.9)
    gathering.beat(second)
    gathering.wait(TIMING.heartbeat_timeout_seconds * 0.2)
    assert [type(effect) for effect in gathering.pool] == [PoolSuspended]
    assert gathering.rank_states == [RankState.LOST, RankState.READY]


def test_a_rank_that_was_away_before_is_not_excused() -> None:
    gathering = Gathering()
    first, second = gathering.form()
    gathering.wait(TIMING.heartbeat_timeout_seconds)
    gathering.break_link(first, is_expected=True)
    gathering.members.excuse(gathering.now_seconds)
    assert gathering.rank_states == [RankState.LOST, RankState.SILENT]
    gathering.beat(second)
    assert gathering.members.state is PoolState.DEGRADED
