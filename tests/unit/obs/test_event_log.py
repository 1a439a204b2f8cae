"""The event log keeps the newest batches and says what it no longer has."""

import asyncio

import pytest

from kvpool.server.core.errors import AbortedError, InvalidArgumentError, WrongStateError
from kvpool.server.core.events import AllBlocksCleared
from kvpool.server.obs.event_log import EventLog

EVENTS = [AllBlocksCleared()]


def test_batches_are_numbered_without_gaps_and_the_oldest_go() -> None:
    log = EventLog(kept_batches=2)
    log.append([])
    assert log.last_sequence == 0
    for _ in range(3):
        log.append(EVENTS)
    assert log.last_sequence == 3
    assert log.kept(2) is log.kept(3) is EVENTS
    with pytest.raises(WrongStateError) as caught:
        log.check_start(1)
    assert caught.value.reason == "EVENTS_NOT_KEPT"
    log.check_start(4)
    with pytest.raises(InvalidArgumentError):
        log.check_start(5)


async def test_a_watcher_waits_for_the_next_batch() -> None:
    log = EventLog()
    waiting = asyncio.create_task(log.get(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.append(EVENTS)
    assert await waiting is EVENTS


async def test_a_watcher_that_fell_behind_is_told() -> None:
    log = EventLog(kept_batches=1)
    for _ in range(2):
        log.append(EVENTS)
    with pytest.raises(WrongStateError):
        await log.get(1)


async def test_a_closed_log_is_read_to_its_end_and_then_says_why() -> None:
    log = EventLog()
    log.append([AllBlocksCleared()])
    waiting = asyncio.create_task(log.get(2))
    await asyncio.sleep(0)
    log.close(AbortedError("POOL_REMOVED", "gone"))
    with pytest.raises(AbortedError, match="gone"):
        await waiting
    assert list(await log.get(1)) == [AllBlocksCleared()]
    with pytest.raises(AbortedError, match="gone"):
        await log.get(2)
