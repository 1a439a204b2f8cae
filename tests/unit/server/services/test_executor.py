"""What follows from commands, and commands that fail."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpool.client import FullAttentionSpec, KVCacheGroup
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import Drain, EndReason, EndSession, OpenSession, ResetPrefixCache, SuspendPool, Undrain
from kvpool.core.errors import UnavailableError
from kvpool.core.ids import PoolName, SessionId
from kvpool.server.config import ServerConfig
from kvpool.server.services.calls import OpenCall
from kvpool.server.services.components import Components
from kvpool.server.services.executor import ChangeFailedError
from support.clock import ManualClock
from support.journal import Recorder
from support.server import pool_config
from support.waiting import DEADLINE_SECONDS


def server_with_pool(**options: Any) -> Components:
    parts = Components(ServerConfig(), **options)
    parts.pools.create(pool_config())
    return parts


def _fail(*_: object, **__: object) -> None:
    raise MemoryError


def _expire(parts: Components, clock: ManualClock) -> None:
    clock.seconds += 60.0
    parts.sessions.end_due()


def _end(reason: EndReason) -> Callable[[Components, ManualClock], object]:
    return lambda parts, _: parts.executor.execute(EndSession(SessionId("s"), reason))


ENDS: dict[str, Callable[[Components, ManualClock], object]] = {
    "SESSION_CLOSED": lambda parts, _: parts.sessions.close("s"),
    "SESSION_EVICTED": _end(EndReason.SESSION_EVICTED),
    "PROCESS_GONE": _end(EndReason.PROCESS_GONE),
    "LEASE_EXPIRED": _expire,
}


@pytest.mark.parametrize("reason", ENDS)
async def test_the_end_of_a_session_ends_its_calls_and_schedules_a_fence(reason: str) -> None:
    clock = ManualClock()
    parts = server_with_pool(clock=clock)
    _, session = parts.sessions.open(OpenSession("m", SessionId("s"), "", 10.0))
    call = OpenCall()
    with parts.calls.of_session(session.session_id, call):
        ENDS[reason](parts, clock)
    assert call.ended_by
    assert call.ended_by.reason == reason
    assert list(await parts.executor.fencing.next_due()) == ["m"]


async def test_a_session_that_is_closed_twice_ends_once(caplog: pytest.LogCaptureFixture) -> None:
    parts = server_with_pool()
    parts.sessions.open(OpenSession("m", SessionId("s"), "", 10.0))
    with caplog.at_level(logging.INFO, "kvpool.server"):
        assert [parts.sessions.close("s"), parts.sessions.close("s")] == [0, 0]
    assert [record.msg for record in caplog.records] == ["session closed"]


async def test_a_pool_that_may_have_become_ready_wakes_the_calls_that_wait_for_it() -> None:
    parts = Components(ServerConfig())
    parts.executor.execute(Drain(PoolName("m")))
    waiting = asyncio.create_task(parts.pools.wait_until_ready("m", 60.0))
    await asyncio.sleep(0)
    parts.pools.create(pool_config())
    await asyncio.sleep(0)
    assert not waiting.done(), "the pool is drained"
    parts.executor.execute(SuspendPool("m"))
    parts.executor.execute(Undrain(PoolName("m")))
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert (await waiting).config.name == "m"


def test_a_command_that_fails_halfway_or_cannot_be_recorded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    parts = server_with_pool(journal=recorder)
    executor = parts.executor
    with pytest.raises(ChangeFailedError, match="halfway") as caught:
        executor.execute(OpenSession("m", SessionId("s1"), "\ud800", 10.0))
    assert isinstance(caught.value.__cause__, UnicodeEncodeError)
    assert recorder.num_bugs == 1
    monkeypatch.setattr(KVCacheManager, "reset_prefix_cache", _fail)
    with pytest.raises(ChangeFailedError, match="halfway"):
        executor.execute(ResetPrefixCache("m"))
    assert recorder.num_bugs == 2, "a lack of memory halfway is no refusal"
    executor.execute(Drain(PoolName("m")))
    with pytest.raises(UnavailableError):
        executor.execute(OpenSession("m", SessionId("s2"), "", 10.0))
    assert recorder.num_bugs == 2, "a refusal is no bug"


def test_a_pool_with_rare_hits_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    parts = Components(ServerConfig())
    groups = tuple(KVCacheGroup(FullAttentionSpec(block_size), (f"l{block_size}",)) for block_size in (6, 4))
    for config in (pool_config("even"), replace(pool_config("uneven"), groups=groups)):
        parts.pools.create(config)
    (warning,) = [record for record in caplog.records if record.msg == "prefixes hit rarely"]
    assert (vars(warning)["pool"], "multiples of 12 tokens" in vars(warning)["error"]) == ("uneven", True)


async def test_a_session_is_opened_at_the_time_at_which_its_key_was_looked_up() -> None:
    """Otherwise its lease can end in between, and the key opens another session, with an unchecked lease."""
    clock = ManualClock()
    parts = server_with_pool(clock=clock)
    parts.sessions.open(OpenSession("m", SessionId("s"), "", 10.0, open_key="key"))
    clock.seconds += 9.5
    opened, now_seconds = parts.sessions.opened_by("key", "")
    clock.seconds += 1.0
    assert opened
    again = parts.executor.execute(OpenSession("m", SessionId("other"), "", 0.0, open_key="key"), now_seconds)
    assert (again.session_id, again.is_new) == ("s", False)
