"""Ranks that count as present without a stream: their server was replaced, or could not answer them."""

from dataclasses import replace
from itertools import count

import pytest

from kvpool.core.errors import UnavailableError
from kvpool.core.ranks.effects import EpochPassed, PoolSuspended
from kvpool.core.ranks.messages import HeldTensors, LinkId, PoolState, Rank, RankState, Ready
from support.ranks import TIMING, Gathering, registration


@pytest.fixture
def after() -> Gathering:
    """Two ranks whose server was replaced just now."""
    before, after = Gathering(), Gathering()
    before.form()
    links = map(LinkId, count(100))
    after.members.restore(before.members.rank_group(), links, after.now_seconds, expects_ranks=True)
    after.epoch, after.is_serving = before.epoch, True
    return after


def returning(gathering: Gathering, rank: int) -> LinkId:
    members = gathering.members
    said = replace(registration(), world_size=2, rank=Rank(rank), boot_id=f"process-{rank}")
    return gathering.register(replace(said, held=HeldTensors(members.epoch, 100), last_epoch=members.epoch))


def test_the_pool_serves_while_its_ranks_register_again(after: Gathering) -> None:
    assert after.members.state is PoolState.READY
    links = [returning(after, 0), returning(after, 1)]
    assert all(isinstance(after.last(link), Ready) for link in links)
    assert after.members.state is PoolState.READY
    assert not after.pool
    assert not any(member.is_expected for member in after.members.registry)


def test_a_rank_that_does_not_return_is_lost_after_the_heartbeat_timeout(after: Gathering) -> None:
    link = returning(after, 0)
    after.wait(TIMING.heartbeat_timeout_seconds * 0.9)
    after.beat(link)
    assert after.members.state is PoolState.READY
    after.wait(TIMING.heartbeat_timeout_seconds * 0.2)
    assert [type(effect) for effect in after.pool] == [PoolSuspended]
    assert after.rank_states == [RankState.READY, RankState.LOST]
    returning(after, 1)
    assert after.members.state is PoolState.READY


def test_the_epoch_passes_when_the_grace_time_of_a_missing_rank_is_over(after: Gathering) -> None:
    link = returning(after, 0)
    epoch = after.members.epoch
    for _ in range(int((TIMING.heartbeat_timeout_seconds + TIMING.grace_seconds) / TIMING.heartbeat_seconds) + 2):
        after.wait(TIMING.heartbeat_seconds)
        after.beat(link)
    assert EpochPassed(epoch + 1) in after.pool


def test_another_process_may_not_take_the_place_of_an_expected_rank(after: Gathering) -> None:
    with after.refuses(UnavailableError, match="may return"):
        after.register(replace(registration(), world_size=2, rank=Rank(1), boot_id="another-process"))


def test_a_rank_that_left_without_answers_counts_as_present_until_it_returns(
    world: Gathering, links: list[LinkId]
) -> None:
    world.pool.clear()
    world.wait(TIMING.heartbeat_timeout_seconds * 0.9)
    world.break_link(links[0], is_expected=True)
    world.members.excuse(world.now_seconds)
    world.wait(TIMING.heartbeat_timeout_seconds * 0.9)
    again = returning(world, 0)
    assert isinstance(world.last(again), Ready)
    assert not world.pool
    assert not any(member.is_expected for member in world.members.registry)


def test_a_rank_that_left_without_answers_and_died_is_lost_after_the_heartbeat_timeout(
    world: Gathering, links: list[LinkId]
) -> None:
    world.pool.clear()
    world.break_link(links[0], is_expected=True)
    world.wait(TIMING.heartbeat_timeout_seconds * 0.9)
    world.beat(links[1])
    world.wait(TIMING.heartbeat_timeout_seconds * 0.2)
    assert [type(effect) for effect in world.pool] == [PoolSuspended]
    assert world.rank_states == [RankState.LOST, RankState.READY]


def test_a_rank_that_was_away_before_is_not_excused(world: Gathering, links: list[LinkId]) -> None:
    world.wait(TIMING.heartbeat_timeout_seconds)
    world.break_link(links[0], is_expected=True)
    world.members.excuse(world.now_seconds)
    assert world.rank_states == [RankState.LOST, RankState.SILENT]
    world.beat(links[1])
    assert world.members.state is PoolState.DEGRADED
