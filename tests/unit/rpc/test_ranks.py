"""The streams of ranks and what becomes of their pools, without a wire."""

import asyncio
import time

import pytest

from kvpool.server.core.membership import Membership
from kvpool.server.core.session_ends import REMEMBERED_ENDS
from kvpool.server.core.types import SessionId
from kvpool.server.core.world import Allocated, PoolState, RankTiming
from kvpool.server.rpc.hub import Hub, Stream
from kvpool.server.rpc.ranks import RankLink, Ranks
from support_ranks import BLOCK_BYTES, registration

TIMING = RankTiming(heartbeat_seconds=0.1, heartbeat_timeout_seconds=0.4, grace_seconds=60.0)


class Place:
    """A hub and its ranks, whose streams are those of the current task."""

    def __init__(self) -> None:
        self.hub = Hub(2**24)
        self.ranks = Ranks(self.hub, TIMING, 2**24, 256)

    def join(self, rank: int, world_size: int = 2) -> tuple[Membership, RankLink]:
        """A stream that registers."""
        task = asyncio.current_task()
        assert task
        link = self.ranks.open_link(Stream(task))
        return self.ranks.register(link, "m", registration(rank, world_size)), link

    def open(self) -> tuple[Membership, RankLink]:
        """A pool of one rank."""
        membership, link = self.join(0, 1)
        self.ranks.initialized(membership, link, Allocated(1, 100, 100 * BLOCK_BYTES))
        assert membership.state is PoolState.READY
        return membership, link


async def test_the_end_of_an_old_stream_takes_nothing_from_a_pool_that_forms_anew() -> None:
    place = Place()
    before, old = place.join(0)
    place.ranks.leave(before, old)
    assert place.ranks.membership("m") is None
    now, _ = place.join(1)
    place.ranks.close_link(before, old)
    assert place.ranks.membership("m") is now


async def test_an_epoch_passes_for_more_sessions_than_are_remembered() -> None:
    place = Place()
    membership, link = place.open()
    for i in range(REMEMBERED_ENDS + 1):
        place.hub.allocator.open_session("m", "", 60.0, session_id=SessionId(str(i)), now_seconds=0.0)
    place.ranks.leave(membership, link)
    info = place.ranks.describe("m")
    assert (info.sessions, info.epoch, info.state) == (0, 2, PoolState.DEGRADED)


@pytest.mark.parametrize("busy_seconds", [1.0, 3.0])
async def test_no_rank_is_blamed_for_the_time_that_the_server_was_busy(busy_seconds: float) -> None:
    place = Place()
    place.open()
    watch = asyncio.create_task(place.ranks.watch())
    await asyncio.sleep(0)
    time.sleep(busy_seconds)  # noqa: ASYNC251 - the loop is to stand still
    await asyncio.sleep(0.05)
    assert place.ranks.describe("m").state is PoolState.READY
    await asyncio.sleep(TIMING.heartbeat_timeout_seconds)
    assert place.ranks.describe("m").state is PoolState.DEGRADED, "nothing is heard of it all the same"
    watch.cancel()
