"""Time and leases of a hub: pauses and jumps of the wall clock end no lease."""

import asyncio
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kvpool.core.commands import Drain, KeepAlive, OpenSession, ResetPrefixCache
from kvpool.core.errors import AbortedError, UnavailableError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.pause_tolerant_clock import MAX_RUN_SECONDS
from kvpool.server.services import hub as hub_module
from kvpool.server.services.hub import Hub
from support.journal import Recorder, assert_alike, replay
from support.server import pool_config
from support.state import DrivenState, driven

LEASE_SECONDS = 10.0


@dataclass
class Clocks:
    """Values of the machine's clocks. Sleeps advance the monotonic clock."""

    monotonic_seconds: float = 1000.0
    wall_seconds: float = 1e9

    async def sleep(self, seconds: float) -> None:
        self.monotonic_seconds += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    shown = SimpleNamespace(monotonic=lambda: clocks.monotonic_seconds, time=lambda: clocks.wall_seconds)
    monkeypatch.setattr(hub_module, "time", shown)
    monkeypatch.setattr(asyncio, "sleep", clocks.sleep)
    return clocks


@pytest.fixture
def hub(clocks: Clocks) -> Hub:
    del clocks  # requested so that the hub starts with them
    hub = Hub(1000, state=DrivenState())
    hub.create_pool(pool_config())
    driven(hub).open_session("m", "", LEASE_SECONDS, session_id=SessionId("s"), now_seconds=hub.now_seconds())
    return hub


async def pass_time(hub: Hub, seconds: float) -> None:
    """Advances time on a server that is not paused."""
    end_seconds = hub.now_seconds() + seconds
    while hub.now_seconds() < end_seconds - 1e-9:
        await hub.sleep_until(end_seconds)


async def test_the_first_call_after_a_pause_finds_its_session(hub: Hub, clocks: Clocks) -> None:
    await pass_time(hub, 9.0)
    clocks.monotonic_seconds += 3600.0
    assert hub.session("s")[1].session_id == "s"
    hub.execute(KeepAlive("s"))
    await pass_time(hub, 0.5)
    clocks.monotonic_seconds += 3600.0
    assert hub.resume_session("s", 0, "")[1].session_id == "s"


async def test_a_pause_extends_no_lease(hub: Hub, clocks: Clocks) -> None:
    await pass_time(hub, 5.0)
    clocks.monotonic_seconds += 3600.0
    await pass_time(hub, 5.0)
    with pytest.raises(AbortedError):
        hub.session("s")


async def test_after_a_pause_the_clock_stands_still_while_arrived_messages_are_handled(
    hub: Hub, clocks: Clocks
) -> None:
    await pass_time(hub, LEASE_SECONDS - 0.125)
    sleep_seconds: list[float] = []

    async def sleep(seconds: float) -> None:
        sleep_seconds.append(seconds)
        await clocks.sleep(3600.0)

    start_seconds = hub.now_seconds()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        await hub.sleep_until(hub.state.next_expiry_seconds())
    assert sleep_seconds == [0.125, 0.1]
    assert hub.now_seconds() == start_seconds + MAX_RUN_SECONDS, "the clock stood still"


@pytest.mark.parametrize("late_seconds", [0.02, 0.09, 0.2])
async def test_late_wake_ups_with_many_leases_lose_no_time(hub: Hub, clocks: Clocks, late_seconds: float) -> None:
    """Time advances as on the source clock, although each lease that ends costs a late wake-up."""
    for i in range(100):
        lease_seconds = 1.0 + i / 50
        driven(hub).open_session("m", "", lease_seconds, session_id=SessionId(f"s{i}"), now_seconds=hub.now_seconds())
    start_seconds = clocks.monotonic_seconds
    on_time = clocks.sleep

    async def sleep(seconds: float) -> None:
        await on_time(seconds + late_seconds)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        while hub.state.num_sessions > 1:
            await hub.sleep_until(hub.state.next_expiry_seconds())
            hub.expire_now()
    assert clocks.monotonic_seconds - start_seconds == pytest.approx(3.0, abs=0.12 + 2 * late_seconds)


@pytest.mark.parametrize("step_seconds", [-1e8, 1e8])
async def test_jumps_of_the_wall_clock_have_no_effect(hub: Hub, clocks: Clocks, step_seconds: float) -> None:
    clocks.wall_seconds += step_seconds
    await pass_time(hub, 9.5)
    assert hub.session("s")
    clocks.wall_seconds -= 2 * step_seconds
    await pass_time(hub, 10.0)
    with pytest.raises(AbortedError):
        hub.session("s")


async def test_an_expired_lease_is_reported_only_after_its_session_ended(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    await pass_time(hub, LEASE_SECONDS)
    with caplog.at_level(logging.WARNING, "kvpool.server"), pytest.raises(AbortedError) as caught:
        hub.session("s")
    assert caught.value.reason == "LEASE_EXPIRED"
    assert [record.msg for record in caplog.records] == ["lease expired"]
    assert hub.describe("m").sessions == 0


def open_with_key(hub: Hub, session_id: str) -> str:
    hub.opened_by("key", "")
    command = OpenSession("m", SessionId(session_id), "", LEASE_SECONDS, open_key="key")
    return hub.open_session(command)[1].session_id


@pytest.mark.usefixtures("clocks")
async def test_an_open_key_reused_after_expiry_replays_alike() -> None:
    recorder = Recorder()
    hub = Hub(1000, state=DrivenState(), journal=recorder)
    hub.create_pool(pool_config())
    assert [open_with_key(hub, "first"), open_with_key(hub, "not drawn")] == ["first", "first"]
    await pass_time(hub, LEASE_SECONDS)
    assert open_with_key(hub, "second") == "second"
    again = DrivenState()
    replay(again, recorder.records)
    again.renew_leases(hub.now_seconds())
    assert_alike(again, hub.state)
    assert [session.session_id for _, session in again.sessions()] == ["second"]


async def test_a_command_that_fails_halfway_or_cannot_be_recorded_is_reported(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    hub = Hub(1000, journal=recorder)
    hub.create_pool(pool_config())
    with pytest.raises(UnicodeEncodeError):
        hub.execute(OpenSession("m", SessionId("s1"), "\ud800", 10.0))
    assert recorder.num_bugs == 1

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(hub.state.pool("m")), "reset_prefix_cache", broken)
    with pytest.raises(ZeroDivisionError):
        hub.execute(ResetPrefixCache("m"))
    assert recorder.num_bugs == 2
    hub.execute(Drain(PoolName("m")))
    with pytest.raises(UnavailableError):
        hub.execute(OpenSession("m", SessionId("s2"), "", 10.0))
    assert recorder.num_bugs == 2, "a refusal is no bug"


@pytest.mark.usefixtures("clocks")
async def test_lost_sessions_block_new_ones_unless_the_ranks_fence() -> None:
    allocator = DrivenState()
    allocator.lose_sessions()
    hub = Hub(1000, quarantine_seconds=5.0, state=allocator)
    hub.create_pool(pool_config())
    hub.open_epoch(pool_config("fenced"), 2, ranks_fence=True)
    hub.check_takes_session("fenced", "")
    await pass_time(hub, 3.0)
    hub.expire_now()
    with pytest.raises(UnavailableError) as caught:
        hub.check_takes_session("m", "")
    refused = caught.value
    assert (refused.reason, refused.field, refused.retry_seconds) == ("SESSIONS_LOST", "pool_name", 2.0)
    await pass_time(hub, 2.0)
    hub.check_takes_session("m", "")
    assert allocator.lost_may_run
    hub.expire_now()
    assert not allocator.lost_may_run


def test_a_server_without_lost_sessions_does_not_wait(clocks: Clocks) -> None:
    del clocks
    hub = Hub(1000, quarantine_seconds=5.0, state=DrivenState())
    hub.create_pool(pool_config())
    hub.check_takes_session("m", "")


def test_a_pool_starts_above_the_epochs_of_all_removed_pools() -> None:
    hub = Hub(1000)
    hub.past_epoch = 10
    kept, _ = hub.create_pool(pool_config("kept"))
    epochs = []
    for name in ("a", "a", "b", "a"):
        pool, _ = hub.create_pool(pool_config(name))
        epochs.append(pool.epoch)
        hub.remove_pool(name)
    assert (kept.epoch, epochs) == (11, [11, 12, 13, 14])
