"""Late standbys in virtual time: when a primary continues without one, and when it waits for it again.

The primary sends a record per 10 ms while everything is confirmed, as a scheduler does that waits for each answer.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import pytest

from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import Entry, Swap
from kvpool.server.cluster.messages import VERSION, Hello, acknowledgement, to_frame
from kvpool.server.cluster.replica import NOTHING, Effect, Replica, SendSwap
from kvpool.server.cluster.shipper import FollowerLink, Shipper
from kvpool.server.cluster.standbys import Standbys
from support.directory import member_of
from support.state import DrivenState

ME, OTHER = member_of("me"), member_of("other")
TICK_SECONDS: Final = 0.01
BEAT_TICKS: Final = 10
Runs = Callable[[float], bool]
"""Whether the standby runs at a time."""


class _Transport(asyncio.Transport):
    """A connection of which the standby learns the end at once."""

    def __init__(self, link: FollowerLink) -> None:
        super().__init__()
        self.link = link
        self.is_open = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        if self.is_open:
            self.is_open = False
            self.link.connection_lost(None)


class Pair:
    """A primary whose swaps win at once, and a standby that a test plays.

    Attributes:
        now_seconds: The virtual time.
        standby_runs: Whether the standby acknowledges what it has received.
        repeats: Whether the standby repeats its last acknowledgement instead.
        num_removals: How often the standby was removed from the in-sync members.
        num_rounds: Number of confirmed records.
    """

    def __init__(self, min_in_sync: int = 1) -> None:
        self.now_seconds = 100.0
        self.standby_runs: Runs = lambda _: True
        self.repeats = False
        self.num_removals = 0
        self.num_rounds = 0
        self._num_ticks = 0
        self.replica = Replica(ME, has_state=False, known_term=0, new_id=lambda: "id", min_in_sync=min_in_sync)
        self.shipper = Shipper(
            self.replica,
            DrivenState(),
            asyncio.Lock(),
            check=lambda _: None,
            carry_out=self._carry_out,
            max_log_bytes=2**20,
            now_seconds=lambda: self.now_seconds,
            state_seconds=lambda: 0.0,
        )
        config = ClusterConfig(standby_timeout_seconds=1.0)
        self.standbys = Standbys(config, self.replica, self.shipper)
        self._carry_out(self.replica.directory_read(Entry(0, None)))
        self.shipper.begin()
        self.transport: _Transport | None = None

    @property
    def is_in_sync(self) -> bool:
        return OTHER in self.replica.in_sync

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        for _ in range(round(seconds / TICK_SECONDS)):
            self.now_seconds += TICK_SECONDS
            self._num_ticks += 1
            if self.replica.confirmed == self.replica.last_position:
                self.num_rounds += 1
                self.shipper.append(b"record")
            if self.standby_runs(self.now_seconds):
                self._standby_runs()
            if self._num_ticks % BEAT_TICKS == 0:
                self._beat()

    def run_until(self, is_done: Callable[[], bool]) -> float:
        """Lets time pass until something is so. Returns how long it took."""
        start_seconds = self.now_seconds
        while not is_done():
            self.run(TICK_SECONDS)
            assert self.now_seconds < start_seconds + 60
        return self.now_seconds - start_seconds

    def _beat(self) -> None:
        self.shipper.mark()
        self.shipper.measure_lags()
        self._carry_out(self.standbys.dismiss_late(self.now_seconds))

    def _standby_runs(self) -> None:
        if self.transport is None or not self.transport.is_open:
            link = FollowerLink(self.shipper)
            self.transport = _Transport(link)
            link.connection_made(self.transport)
            link.data_received(to_frame(Hello(VERSION, "c/s", "core", "", OTHER, 1, 1, NOTHING)))
        link = self.transport.link
        position = link.acknowledged if self.repeats else self.shipper.log.last_position
        link.data_received(acknowledgement(position))

    def _carry_out(self, effects: list[Effect]) -> None:
        was_in_sync = self.is_in_sync
        for effect in effects:
            if isinstance(effect, SendSwap):
                won = Swap(won=True, entry=Entry(effect.revision + 1, effect.record))
                self._carry_out(self.replica.swap_ended(won))
        self.num_removals += was_in_sync and not self.is_in_sync


@pytest.fixture(name="pair")
async def fixture_pair() -> Pair:
    """A standby that is in sync."""
    pair = Pair()
    pair.run_until(lambda: pair.is_in_sync)
    pair.run(1)
    return pair


def runs_for(seconds: float, of_seconds: float) -> Runs:
    return lambda now_seconds: now_seconds % of_seconds < seconds


async def test_answers_wait_for_a_silent_standby_up_to_the_limit(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvpool.server.cluster"):
        pair.standby_runs = lambda _: False
        pair.run(0.9)
        assert pair.is_in_sync
        pair.run(0.3)
    assert not pair.is_in_sync
    assert pair.replica.confirmed == pair.replica.last_position
    assert caplog.messages.count("standby late") == 1


async def test_a_standby_that_repeats_its_acknowledgement_is_removed_as_a_silent_one(pair: Pair) -> None:
    pair.repeats = True
    assert pair.run_until(lambda: not pair.is_in_sync) == pytest.approx(1.1, abs=0.15)
    assert pair.replica.confirmed == pair.replica.last_position


async def test_a_standby_that_repeats_its_acknowledgement_does_not_come_back(pair: Pair) -> None:
    pair.repeats = True
    pair.run(30)
    assert pair.num_removals == 1
    pair.repeats = False
    pair.run_until(lambda: pair.is_in_sync)


async def test_a_standby_that_often_delays_answers_is_removed_for_good(pair: Pair) -> None:
    pair.standby_runs = runs_for(0.1, 1.0)
    assert pair.run_until(lambda: not pair.is_in_sync) < 3
    pair.num_rounds = 0
    pair.run(30)
    assert not pair.is_in_sync
    assert pair.num_removals == 1
    assert pair.num_rounds > 2900


async def test_a_standby_that_was_late_comes_back_when_it_has_kept_up_for_a_time(pair: Pair) -> None:
    pair.standby_runs = lambda _: False
    pair.run_until(lambda: not pair.is_in_sync)
    pair.standby_runs = lambda _: True
    assert pair.run_until(lambda: pair.is_in_sync) == pytest.approx(3.1, abs=0.3)
    pair.run(30)
    assert pair.num_removals == 1
    assert not pair.shipper.late_seconds


async def test_a_standby_that_delays_answers_now_and_then_stays(pair: Pair) -> None:
    pair.standby_runs = runs_for(4.3, 5.0)
    pair.run(60)
    assert pair.num_removals == 0


async def test_a_standby_that_is_always_a_little_late_stays(pair: Pair) -> None:
    pair.standby_runs = runs_for(TICK_SECONDS, 0.2)
    pair.run(60)
    assert pair.num_removals == 0


async def test_a_new_connection_does_not_make_up_for_delays(pair: Pair) -> None:
    """Otherwise a slow standby could stay by connecting again."""
    pair.standby_runs = lambda _: False
    pair.run(0.8)
    assert pair.is_in_sync
    assert pair.transport
    pair.transport.abort()
    pair.standby_runs = lambda _: True
    assert pair.run_until(lambda: pair.is_in_sync) > 1


async def test_a_standby_that_was_on_time_is_back_at_once(pair: Pair) -> None:
    assert pair.transport
    pair.transport.abort()
    assert not pair.is_in_sync
    pair.run(2 * TICK_SECONDS)
    assert pair.is_in_sync


async def test_a_primary_that_needs_a_standby_does_not_wait_until_it_has_kept_up() -> None:
    pair = Pair(min_in_sync=2)
    pair.run_until(lambda: pair.is_in_sync)
    pair.standby_runs = lambda _: False
    pair.run_until(lambda: not pair.is_in_sync)
    assert pair.replica.confirmed == NOTHING
    pair.run(0.2)
    pair.standby_runs = lambda _: True
    assert pair.run_until(lambda: pair.is_in_sync) < 0.1
    pair.run(30)
    assert pair.num_removals == 1


async def test_a_primary_that_was_paused_blames_no_standby(pair: Pair) -> None:
    pair.standby_runs = lambda _: False
    pair.run(0.3)
    pair.now_seconds += 60.0
    pair._beat()
    assert pair.is_in_sync
    pair.standby_runs = lambda _: True
    pair.run(1)
    assert pair.num_removals == 0
