"""Sessions over time: pauses and jumps of the wall clock end no lease."""

import asyncio
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kvpool.core.commands import ApplyStep, KeepAlive, OpenSession
from kvpool.core.errors import AbortedError, UnavailableError
from kvpool.core.execution import end_session
from kvpool.core.ids import SessionId
from kvpool.core.pause_tolerant_clock import MAX_RUN_SECONDS
from kvpool.core.ranks.effects import PoolOpened
from kvpool.core.steps.columns import Operation, Step
from kvpool.server.config import ServerConfig
from kvpool.server.services import clock as clock_module
from kvpool.server.services.components import Components
from kvpool.wire.changes import change_bytes
from kvpool.wire.steps import step_to_proto
from support.journal import Recorder, assert_alike, replay
from support.server import pool_config
from support.state import DrivenState

LEASE_SECONDS = 10.0
NO_QUARANTINE = ServerConfig(quarantine_seconds=0.0)


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
    monkeypatch.setattr(clock_module, "time", shown)
    monkeypatch.setattr(asyncio, "sleep", clocks.sleep)
    return clocks


@pytest.fixture
def parts(clocks: Clocks) -> Components:
    del clocks  # requested so that the clock starts with them
    parts = Components(NO_QUARANTINE)
    parts.pools.create(pool_config())
    open_session(parts, "s")
    return parts


def open_session(parts: Components, session_id: str, lease_seconds: float = LEASE_SECONDS, open_key: str = "") -> str:
    _, now_seconds = parts.sessions.opened_by(open_key, "")
    command = OpenSession("m", SessionId(session_id), "", lease_seconds, open_key=open_key)
    return parts.sessions.open(command, now_seconds)[1].session_id


async def pass_time(parts: Components, seconds: float) -> None:
    """Advances time on a server that is not paused."""
    clock = parts.clock
    end_seconds = clock.now_seconds() + seconds
    while clock.now_seconds() < end_seconds - 1e-9:
        await clock.sleep_until(end_seconds)


async def test_the_first_call_after_a_pause_finds_its_session(parts: Components, clocks: Clocks) -> None:
    await pass_time(parts, 9.0)
    clocks.monotonic_seconds += 3600.0
    assert parts.sessions.find("s")[1].session_id == "s"
    parts.executor.execute(KeepAlive("s"))
    await pass_time(parts, 0.5)
    clocks.monotonic_seconds += 3600.0
    assert parts.sessions.find("s")[1].session_id == "s"


async def test_a_pause_extends_no_lease(parts: Components, clocks: Clocks) -> None:
    await pass_time(parts, 5.0)
    clocks.monotonic_seconds += 3600.0
    await pass_time(parts, 5.0)
    with pytest.raises(AbortedError):
        parts.sessions.find("s")


async def test_after_a_pause_the_clock_stands_still_while_arrived_messages_are_handled(
    parts: Components, clocks: Clocks
) -> None:
    await pass_time(parts, LEASE_SECONDS - 0.125)
    sleep_seconds: list[float] = []

    async def sleep(seconds: float) -> None:
        sleep_seconds.append(seconds)
        await clocks.sleep(3600.0)

    start_seconds = parts.clock.now_seconds()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        await parts.clock.sleep_until(parts.state.next_expiry_seconds())
    assert sleep_seconds == [0.125, 0.1]
    assert parts.clock.now_seconds() == start_seconds + MAX_RUN_SECONDS, "the clock stood still"


@pytest.mark.parametrize("late_seconds", [0.02, 0.09, 0.2])
async def test_late_wake_ups_with_many_leases_lose_no_time(
    parts: Components, clocks: Clocks, late_seconds: float
) -> None:
    """Time advances as on the source clock, although each lease that ends costs a late wake-up."""
    for i in range(100):
        lease_seconds = 1.0 + i / 50
        open_session(parts, f"s{i}", lease_seconds)
    start_seconds = clocks.monotonic_seconds
    on_time = clocks.sleep

    async def sleep(seconds: float) -> None:
        await on_time(seconds + late_seconds)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        while len(parts.state.sessions) > 1:
            await parts.clock.sleep_until(parts.state.next_expiry_seconds())
            parts.sessions.end_due()
    assert clocks.monotonic_seconds - start_seconds == pytest.approx(3.0, abs=0.12 + 2 * late_seconds)


@pytest.mark.parametrize("step_seconds", [-1e8, 1e8])
async def test_jumps_of_the_wall_clock_have_no_effect(parts: Components, clocks: Clocks, step_seconds: float) -> None:
    clocks.wall_seconds += step_seconds
    await pass_time(parts, 9.5)
    assert parts.sessions.find("s")
    clocks.wall_seconds -= 2 * step_seconds
    await pass_time(parts, 10.0)
    with pytest.raises(AbortedError):
        parts.sessions.find("s")


async def test_an_expired_lease_is_reported_only_after_its_session_ended(
    parts: Components, caplog: pytest.LogCaptureFixture
) -> None:
    await pass_time(parts, LEASE_SECONDS)
    with caplog.at_level(logging.WARNING, "kvpool.server"), pytest.raises(AbortedError) as caught:
        parts.sessions.find("s")
    assert caught.value.reason == "LEASE_EXPIRED"
    assert [record.msg for record in caplog.records] == ["lease expired"]
    assert parts.pools.describe("m").sessions == 0


@pytest.mark.usefixtures("clocks")
async def test_an_open_key_reused_after_expiry_replays_alike() -> None:
    recorder = Recorder()
    parts = Components(NO_QUARANTINE, journal=recorder)
    parts.pools.create(pool_config())
    opened = [open_session(parts, session_id, open_key="key") for session_id in ("first", "not drawn")]
    assert opened == ["first", "first"]
    await pass_time(parts, LEASE_SECONDS)
    assert open_session(parts, "second", open_key="key") == "second"
    again = DrivenState()
    replay(again, recorder.records)
    again.renew_leases(parts.clock.now_seconds())
    assert_alike(again, parts.state)
    assert [session.session_id for _, session in again.sessions] == ["second"]


@pytest.mark.usefixtures("clocks")
async def test_lost_sessions_block_new_ones_unless_the_ranks_fence() -> None:
    allocator = DrivenState()
    allocator.lose_sessions()
    parts = Components(ServerConfig(quarantine_seconds=5.0), allocator)
    parts.pools.create(pool_config())
    parts.pools.open_epoch(PoolOpened(pool_config("fenced"), 2, ranks_fence=True), "")
    parts.sessions.check_can_open("fenced", "")
    await pass_time(parts, 3.0)
    parts.sessions.end_due()
    with pytest.raises(UnavailableError) as caught:
        parts.sessions.check_can_open("m", "")
    refused = caught.value
    assert (refused.reason, refused.field, refused.retry_seconds) == ("SESSIONS_LOST", "pool_name", 2.0)
    await pass_time(parts, 2.0)
    parts.sessions.check_can_open("m", "")
    assert allocator.lost_may_run
    parts.sessions.end_due()
    assert not allocator.lost_may_run


def test_a_large_session_closes_in_parts_that_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_session, "MAX_PART_BLOCKS", 4)
    recorder = Recorder()
    parts = Components(NO_QUARANTINE, DrivenState(), recorder)
    parts.pools.create(pool_config())
    session_id = open_session(parts, "s")
    for number in range(1, 4):
        step = Step(number, operations=[Operation.ADMIT], request_numbers=[number], declares=[True])
        step.request_ids, step.num_appended_tokens, step.block_hashes = [f"r{number}"], [16], bytes([number]) * 32 * 4
        parts.executor.execute(ApplyStep(session_id, step, change_bytes(step_to_proto(step, ""))))
    num_before = len(recorder.records)
    freed = list(iter(lambda: parts.sessions.free_part(session_id), None))
    assert freed == [0, 0, 0, 1, 1], "parts that evict, then parts that free; one request is left"
    assert parts.sessions.close(session_id, sum(freed)) == 3
    assert len(recorder.records) == num_before + 6
    replay(again := DrivenState(), recorder.records)
    assert_alike(parts.state, again)
    assert [parts.sessions.free_part(session_id), parts.sessions.close(session_id)] == [None, 3]
