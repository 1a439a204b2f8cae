"""Recovery of pools with ranks from a journal, also one that ends between two records of one change."""

from dataclasses import replace

import pytest

from kvpool.core.commands import OpenEpoch, SuspendPool
from kvpool.core.errors import AbortedError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.ranks.messages import RankGroup
from kvpool.server.config import ServerConfig
from kvpool.server.limits.config import Limits
from kvpool.server.services.calls import OpenCall
from kvpool.server.services.components import Components
from kvpool.v1 import pool_pb2
from support.core import config
from support.ranks import OPTIONS, TIMING, Gathering, registration
from support.state import DrivenState

NAME = PoolName("m")


CONFIG = ServerConfig(max_pool_blocks=100, max_pools=10, rank_timing=TIMING)


async def recovered(world: RankGroup, *, expects_ranks: bool = False, was_suspended: bool = False) -> Components:
    """Recovers a pool in epoch 1 with a session and a rank group."""
    state = DrivenState()
    state.open_epoch(config(), b"n" * 32, 1)
    state.open_session("m", "", 10.0, session_id=SessionId("s"), now_seconds=0.0)
    state.keep_rank_group(NAME, world)
    if was_suspended:
        state.execute(SuspendPool(NAME), 0.0)
    parts = Components(CONFIG, state)
    parts.restore(expects_ranks=expects_ranks)
    return parts


async def test_ranks_are_lost_until_they_are_back() -> None:
    gathering = Gathering()
    gathering.form()
    parts = await recovered(gathering.members.rank_group())
    assert [rank.state for rank in parts.pools.describe("m").ranks] == [pool_pb2.RANK_STATE_LOST] * 2
    assert parts.pools.describe("m").state == pool_pb2.POOL_STATE_DEGRADED
    assert parts.state.pools.get("m").is_suspended
    parts.sessions.find("s")


@pytest.mark.parametrize(
    ("was_suspended", "rank_state", "pool_state"),
    [
        (False, pool_pb2.RANK_STATE_READY, pool_pb2.POOL_STATE_READY),
        (True, pool_pb2.RANK_STATE_LOST, pool_pb2.POOL_STATE_DEGRADED),
    ],
)
async def test_a_pool_whose_ranks_are_expected_serves_if_it_served(
    *, was_suspended: bool, rank_state: int, pool_state: int
) -> None:
    gathering = Gathering()
    gathering.form()
    parts = await recovered(gathering.members.rank_group(), expects_ranks=True, was_suspended=was_suspended)
    described = parts.pools.describe("m")
    assert [rank.state for rank in described.ranks] == [rank_state] * 2
    assert (described.state, parts.state.pools.get("m").is_suspended) == (pool_state, was_suspended)


async def test_an_epoch_that_had_passed_before_the_end_is_passed() -> None:
    parts = await recovered(RankGroup(2, OPTIONS))
    assert parts.state.pools.get("m").epoch == parts.pools.describe("m").epoch == 2
    with pytest.raises(AbortedError, match="rank"):
        parts.sessions.find("s")


async def test_an_epoch_that_was_about_to_open_starts_without_ranks() -> None:
    gathering = Gathering()
    gathering.form()
    world = gathering.members.rank_group()
    parts = await recovered(RankGroup(2, world.options, world.plan, world.members))
    assert parts.state.pools.get("m").epoch == 2
    assert parts.pools.describe("m").ranks == []


async def test_a_pool_that_never_opened_does_not_exist() -> None:
    state = DrivenState()
    state.keep_rank_group(NAME, RankGroup(1, OPTIONS))
    parts = Components(CONFIG, state)
    parts.restore()
    assert parts.pools.names() == []


async def test_the_blocks_of_a_recovered_pool_count_to_its_token() -> None:
    gathering = Gathering()
    gathering.form()
    world = gathering.members.rank_group()
    state = DrivenState()
    state.execute(OpenEpoch(config(), b"n" * 32, 1, owner="x"), 0.0)
    state.keep_rank_group(NAME, RankGroup(1, OPTIONS, world.plan, world.members))
    parts = Components(replace(CONFIG, limits=Limits(max_token_blocks=80)), state)
    parts.restore()
    for rank in range(2):
        call = OpenCall()
        parts.ranks.register(call, NAME, registration(rank, boot_id=f"process-{rank}-new"))
    assert call.ended_by
    assert (call.ended_by.reason, parts.pools.describe(NAME).epoch) == ("TOO_MANY_TOKEN_BLOCKS", 2)
