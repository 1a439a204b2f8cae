"""Recovery of pools with ranks from a journal, also one that ends between two records of one change."""

import pytest

from kvpool.core.errors import AbortedError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.ranks.messages import PoolState, RankGroup, RankState
from kvpool.server.services.hub import Hub
from kvpool.server.services.ranks import Ranks
from support.core import config
from support.ranks import OPTIONS, TIMING, Gathering
from support.state import DrivenState, driven

NAME = PoolName("m")


async def recovered(world: RankGroup) -> tuple[Hub, Ranks]:
    """Recovers a pool in epoch 1 with a session and a rank group."""
    hub = Hub(100, state=DrivenState())
    driven(hub).open_epoch(config(), b"n" * 32, 1)
    driven(hub).open_session("m", "", 10.0, session_id=SessionId("s"), now_seconds=hub.now_seconds())
    driven(hub).keep_rank_group(NAME, world)
    hub.restore_pools()
    ranks = Ranks(hub, TIMING, 100, 10)
    ranks.restore()
    return hub, ranks


async def test_ranks_are_lost_until_they_are_back() -> None:
    gathering = Gathering()
    gathering.form()
    hub, ranks = await recovered(gathering.members.rank_group())
    assert [rank.state for rank in ranks.describe("m").ranks] == [RankState.LOST] * 2
    assert ranks.describe("m").state is PoolState.DEGRADED
    assert hub.state.pool("m").is_suspended
    hub.state.session("s", hub.now_seconds())


async def test_an_epoch_that_had_passed_before_the_end_is_passed() -> None:
    hub, ranks = await recovered(RankGroup(2, OPTIONS))
    assert hub.state.pool("m").epoch == ranks.describe("m").epoch == 2
    with pytest.raises(AbortedError, match="rank"):
        hub.state.session("s", hub.now_seconds())


async def test_an_epoch_that_was_about_to_open_starts_without_ranks() -> None:
    gathering = Gathering()
    gathering.form()
    world = gathering.members.rank_group()
    hub, ranks = await recovered(RankGroup(2, world.options, world.plan, world.members))
    assert hub.state.pool("m").epoch == 2
    assert ranks.describe("m").ranks == ()


async def test_a_pool_that_never_opened_does_not_exist() -> None:
    hub = Hub(100, state=DrivenState())
    driven(hub).keep_rank_group(NAME, RankGroup(1, OPTIONS))
    ranks = Ranks(hub, TIMING, 100, 10)
    ranks.restore()
    assert ranks.pool_names() == []
