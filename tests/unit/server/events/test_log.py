"""The event log keeps the newest batches and refuses older ones."""

import asyncio
from dataclasses import replace

import pytest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import AbortedError, InvalidArgumentError, WrongStateError
from kvpool.core.events import AllBlocksCleared
from kvpool.core.ids import PoolName
from kvpool.server.events.log import EventLogs, LiveEventLog
from support.core import admit, config


def changed_pool(name: str = "m") -> KVCacheManager:
    """A pool with one unpublished event."""
    pool = KVCacheManager(replace(config(enable_events=True), name=PoolName(name)), epoch=3)
    assert pool.reset_prefix_cache()
    return pool


def test_batches_are_numbered_without_gaps_and_the_oldest_are_dropped() -> None:
    log = LiveEventLog(kept_batches=2)
    log.publish(KVCacheManager(config(enable_events=True)))
    assert log.last_sequence == 0
    for _ in range(3):
        log.publish(changed_pool())
    assert log.last_sequence == 3
    assert [log.kept(2).sequence, log.kept(3).sequence] == [2, 3]
    with pytest.raises(WrongStateError) as caught:
        log.check_start(1)
    assert caught.value.reason == "EVENTS_NOT_KEPT"
    log.check_start(4)
    with pytest.raises(InvalidArgumentError):
        log.check_start(5)


def test_a_batch_has_its_epoch_and_configuration() -> None:
    log, pool = LiveEventLog(), changed_pool()
    log.publish(pool)
    pool.begin_epoch(config(30, enable_events=True), 4)
    log.publish(pool)
    assert [(log.kept(i).epoch, log.kept(i).config.num_blocks, list(log.kept(i).events)) for i in (1, 2)] == [
        (3, 20, [AllBlocksCleared()]),
        (4, 30, [AllBlocksCleared()]),
    ]


async def test_a_watcher_waits_for_the_next_batch() -> None:
    log = LiveEventLog()
    waiting = asyncio.create_task(log.get(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.publish(changed_pool())
    assert (await waiting).events == [AllBlocksCleared()]


async def test_a_closed_log_is_read_to_its_end_and_then_raises_its_error() -> None:
    log = LiveEventLog()
    log.publish(changed_pool())
    waiting = asyncio.create_task(log.get(2))
    await asyncio.sleep(0)
    log.close(AbortedError("POOL_REMOVED", "gone"))
    with pytest.raises(AbortedError, match="gone"):
        await waiting
    assert list((await log.get(1)).events) == [AllBlocksCleared()]
    with pytest.raises(AbortedError, match="gone"):
        await log.get(2)


def test_kept_batches_are_bounded_by_size_too() -> None:
    pool = KVCacheManager(config(100, enable_events=True))
    log = LiveEventLog(kept_bytes=2500)
    for number in range(6):
        pool.blocks.take_events()
        admit(pool, f"{number}xy", 12)
        log.publish(pool)
    assert log.last_sequence == 6
    assert log.kept(6).sequence == 6
    with pytest.raises(WrongStateError) as caught:
        log.check_start(1)
    assert caught.value.reason == "EVENTS_NOT_KEPT"
    kept = [number for number in range(1, 7) if _is_kept(log, number)]
    assert kept == [4, 5, 6]


def test_the_logs_of_a_server_keep_what_it_says_and_one_batch_however_large() -> None:
    logs = EventLogs(kept_bytes=1)
    log = logs.open(changed_pool())
    for _ in range(2):
        logs.publish(changed_pool())
    assert [_is_kept(log, number) for number in (1, 2)] == [False, True]


def _is_kept(log: LiveEventLog, sequence: int) -> bool:
    try:
        log.kept(sequence)
    except WrongStateError:
        return False
    return True


def test_rule_4_a_recreated_pool_continues_above_its_predecessor() -> None:
    logs = EventLogs(kept_names=2)
    for name, batches in ("a", 5), ("b", 1), ("c", 1), ("d", 2), ("a", 0):
        log = logs.open(changed_pool(name))
        assert logs.open(changed_pool(name)) is logs[PoolName(name)] is log
        for _ in range(batches):
            logs.publish(changed_pool(name))
        logs.close(PoolName(name), AbortedError("POOL_REMOVED", ""))
    forgotten = 5 + 1  # the batches of the first "a", and its end
    assert logs.open(changed_pool("d")).last_sequence == forgotten + 2 + 1
    assert logs.open(changed_pool("a")).last_sequence == forgotten + 1
    assert [logs.open(changed_pool(name)).last_sequence for name in ("b", "c", "new")] == [forgotten] * 3
