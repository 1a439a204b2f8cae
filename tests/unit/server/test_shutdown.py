"""The time at which a server stops; see kvpool.server.shutdown."""

import asyncio

import pytest

from kvpool.core.errors import UnavailableError
from kvpool.server import shutdown
from kvpool.server.shutdown import Shutdown
from support.waiting import DEADLINE_SECONDS


class Situation:
    """A shutdown with sessions and a clock that the test controls."""

    def __init__(self) -> None:
        self.sessions = 1
        self.now_seconds = 100.0
        self.shutdown = Shutdown(lambda: self.sessions, lambda: self.now_seconds)

    async def has_ended(self) -> bool:
        """Whether the wait is over, after enough event loop iterations to detect it."""
        waiting = asyncio.create_task(self.shutdown.wait())
        for _ in range(100):
            await asyncio.sleep(0)
        waiting.cancel()
        return waiting.done()


@pytest.fixture(autouse=True)
def _polls_in_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "_POLL_SECONDS", 0.0)


async def test_a_server_runs_until_a_stop_is_requested() -> None:
    s = Situation()
    s.sessions = 0
    s.shutdown.check_not_requested()
    assert not await s.has_ended()


async def test_it_stops_when_the_last_session_is_closed() -> None:
    s = Situation()
    s.shutdown.request(10)
    assert not await s.has_ended()
    waiting = asyncio.create_task(s.shutdown.wait())
    await asyncio.sleep(0)
    s.sessions = 0
    await asyncio.wait_for(waiting, DEADLINE_SECONDS)


async def test_it_stops_when_the_time_is_up_with_open_sessions() -> None:
    s = Situation()
    s.shutdown.request(10)
    s.now_seconds = 110.0
    assert await s.has_ended()


async def test_the_last_request_of_an_operator_counts_and_can_be_cancelled() -> None:
    s = Situation()
    s.shutdown.request(0)
    s.shutdown.request(50)
    s.now_seconds = 120.0
    assert not await s.has_ended()
    with pytest.raises(UnavailableError, match="about to stop") as refused:
        s.shutdown.check_not_requested()
    assert (refused.value.reason, refused.value.retry_seconds) == ("DRAINED", 5.0)
    s.shutdown.cancel()
    s.now_seconds = 1000.0
    assert not s.shutdown.is_requested
    assert not await s.has_ended()


async def test_a_signal_cannot_be_cancelled_or_postponed() -> None:
    s = Situation()
    s.shutdown.on_signal(10)
    s.shutdown.cancel()
    s.shutdown.request(1000)
    assert not await s.has_ended()
    s.now_seconds = 110.0
    assert await s.has_ended()


async def test_a_signal_can_only_advance_an_operators_stop() -> None:
    s = Situation()
    s.shutdown.request(5)
    s.shutdown.on_signal(1000)
    s.now_seconds = 105.0
    assert await s.has_ended()


async def test_a_second_signal_stops_at_once() -> None:
    s = Situation()
    s.shutdown.on_signal(1000)
    waiting = asyncio.create_task(s.shutdown.wait())
    await asyncio.sleep(0)
    s.shutdown.on_signal(1000)
    await asyncio.wait_for(waiting, DEADLINE_SECONDS)
