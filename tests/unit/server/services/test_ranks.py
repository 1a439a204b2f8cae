"""Streams of ranks and their effect on pools, without gRPC."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvpool.core.commands import OpenSession
from kvpool.core.errors import UnavailableError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.pause_tolerant_clock import MAX_RUN_SECONDS
from kvpool.core.ranks.messages import Allocated, PoolState, RankTiming
from kvpool.core.sessions.session_ends import REMEMBERED_ENDS
from kvpool.server.config import ServerConfig
from kvpool.server.services import clock as clock_module
from kvpool.server.services.calls import OpenCall
from kvpool.server.services.components import Components
from kvpool.server.services.deadlines import watch_deadlines
from kvpool.server.services.executor import ChangeFailedError
from kvpool.server.services.ranks import RankLink
from kvpool.v1 import pool_pb2
from support.ranks import BLOCK_BYTES, registration
from support.state import DrivenState, driven
from support.waiting import DEADLINE_SECONDS

TIMING = RankTiming(heartbeat_seconds=0.5, heartbeat_timeout_seconds=2.0, grace_seconds=60.0)


class Place:
    """A server's parts with ranks, whose streams belong to the current task."""

    def __init__(self) -> None:
        self.parts = Components(ServerConfig(rank_timing=TIMING), DrivenState())
        self.ranks = self.parts.ranks

    def join(self, rank: int, world_size: int = 2) -> RankLink:
        """Opens a stream and registers a rank."""
        return self.ranks.register(OpenCall(), "m", registration(rank, world_size, fences=True))

    def open(self) -> RankLink:
        """Opens a pool of one rank."""
        link = self.join(0, 1)
        self.ranks.initialized(link, Allocated(1, 100, 100 * BLOCK_BYTES))
        assert link.membership.state is PoolState.READY
        return link


async def test_the_end_of_an_old_stream_does_not_affect_a_pool_that_forms_again() -> None:
    place = Place()
    old = place.join(0)
    place.ranks.leave(old)
    assert place.parts.pools.memberships.get(PoolName("m")) is None
    newer = place.join(1)
    place.ranks.close_link(old)
    assert place.parts.pools.memberships.get(PoolName("m")) is newer.membership


async def test_a_server_that_cannot_answer_its_ranks_counts_no_absence() -> None:
    place = Place()
    link = place.open()
    pool = place.parts.state.pools.get(PoolName("m"))
    is_answering = False
    place.ranks.is_answering = lambda: is_answering
    now_seconds = place.parts.clock.now_seconds() + TIMING.heartbeat_timeout_seconds
    place.parts.clock.advance_to(now_seconds)
    place.ranks.tick()
    place.ranks.close_link(link)
    assert not pool.is_suspended
    assert place.ranks.next_deadline_seconds() >= now_seconds + TIMING.heartbeat_timeout_seconds
    is_answering = True
    place.parts.clock.advance_to(place.ranks.next_deadline_seconds())
    place.ranks.tick()
    assert pool.is_suspended


async def test_an_epoch_passes_with_more_sessions_than_are_remembered() -> None:
    place = Place()
    link = place.open()
    for i in range(REMEMBERED_ENDS + 1):
        driven(place.parts).open_session("m", "", 60.0, session_id=SessionId(str(i)), now_seconds=0.0)
    place.ranks.leave(link)
    info = place.parts.pools.describe("m")
    assert (info.sessions, info.epoch, info.state) == (0, 2, pool_pb2.POOL_STATE_DEGRADED)


async def test_ranks_get_one_fence_for_all_sessions_that_end_at_once() -> None:
    place = Place()
    link = place.open()
    sending = asyncio.create_task(place.ranks.send_fences())
    for session_id in ("1", "2", "3"):
        place.parts.sessions.open(OpenSession("m", SessionId(session_id), "", 60.0))
    await asyncio.sleep(0)
    while not link.outbox.empty():
        link.outbox.get_nowait()
    place.parts.sessions.close("1")
    place.parts.sessions.close("3")
    message = await asyncio.wait_for(link.outbox.get(), DEADLINE_SECONDS)
    assert message
    assert (message.fence.last_session_number, list(message.fence.live_session_numbers)) == (3, [2])
    assert link.outbox.empty()
    sending.cancel()


class Clock:
    """A source clock that advances only in the waits of the server, by the requested time plus a delay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_seconds = 0.0
        self._late: asyncio.Queue[float] = asyncio.Queue()
        self._sleep = asyncio.sleep
        monkeypatch.setattr(
            clock_module, "time", SimpleNamespace(monotonic=lambda: self._now_seconds, time=lambda: 0.0)
        )
        monkeypatch.setattr(asyncio, "sleep", self._sleep_of_server)

    async def _sleep_of_server(self, seconds: float) -> None:
        late_seconds = await self._late.get()
        self._now_seconds += seconds + late_seconds
        self._late.task_done()

    async def wake(self, late_seconds: float = 0.0) -> float:
        """Ends one wait `late_seconds` late, and returns the new time."""
        self._late.put_nowait(late_seconds)
        await self._late.join()
        await self._sleep(0)  # the server handles deadlines and waits again
        return self._now_seconds


@pytest.mark.parametrize("busy_seconds", [1.0, 3.0])
async def test_time_in_which_the_server_was_busy_is_not_counted_against_ranks(
    busy_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    place = Place()
    place.open()
    watch = asyncio.create_task(watch_deadlines(place.parts))
    start_seconds = place.parts.clock.now_seconds()
    await clock.wake(busy_seconds)
    await clock.wake()  # the server first handles messages that have arrived
    assert place.parts.clock.now_seconds() - start_seconds == MAX_RUN_SECONDS
    while place.parts.clock.now_seconds() < start_seconds + TIMING.heartbeat_timeout_seconds - 1e-9:
        assert place.parts.pools.describe("m").state == pool_pb2.POOL_STATE_READY, (
            f"at {place.parts.clock.now_seconds()} s"
        )
        await clock.wake()
    await clock.wake()
    assert place.parts.pools.describe("m").state == pool_pb2.POOL_STATE_DEGRADED, "the rank is still silent"
    watch.cancel()


@pytest.mark.parametrize("method", ["heartbeat", "fenced", "initialized", "leave", "link_broke", "tick", "register"])
async def test_a_bug_in_a_change_of_ranks_begins_a_new_epoch_for_which_they_register_again(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place()
    link = place.open()
    driven(place.parts).open_session("m", "", 60.0, session_id=SessionId("s"), now_seconds=0.0)

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    changes: dict[str, Callable[[], object]] = {
        "heartbeat": lambda: place.ranks.heartbeat(link, 1),
        "fenced": lambda: place.ranks.fenced(link, 1, ()),
        "initialized": lambda: place.ranks.initialized(link, Allocated(1, 100, 100 * BLOCK_BYTES)),
        "leave": lambda: place.ranks.leave(link),
        "link_broke": lambda: place.ranks.close_link(link),
        "tick": place.ranks.tick,
        "register": lambda: place.join(0, 1),
    }
    with monkeypatch.context() as patch:
        patch.setattr(type(link.membership), method, fail)
        with pytest.raises(ChangeFailedError):
            changes[method]()
    pool = place.parts.state.pools.get("m")
    assert (pool.epoch, pool.is_suspended, len(pool.sessions)) == (2, True, 0)
    if method != "link_broke":
        assert isinstance(link.call.ended_by, UnavailableError)
        place.ranks.close_link(link)
    place.ranks.tick()
    assert (pool.epoch, pool.is_suspended) == (2, True), "the old stream does not affect the pool"
    assert place.parts.pools.describe("m").state == pool_pb2.POOL_STATE_DEGRADED
    place.ranks.close_link(place.join(0, 1))  # it comes and goes
    place.ranks.tick()
    again = place.join(0, 1)
    place.ranks.initialized(again, Allocated(again.membership.epoch, 100, 100 * BLOCK_BYTES))
    assert place.parts.pools.describe("m").state == pool_pb2.POOL_STATE_READY
    assert (pool.epoch, pool.is_suspended) == (again.membership.epoch, False)
