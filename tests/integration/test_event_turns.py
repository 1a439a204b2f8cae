"""Long work in small parts: one part per turn of the loop, for all waiters together."""

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest

from kvpool.client import WatchKind, aio
from kvpool.core.events import BlockStored
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from kvpool.server.limits.streams import ChunkTurns
from support.publisher import Site
from support.waiting import DEADLINE_SECONDS


class LoopCounter:
    """Counts the turns of the running loop."""

    def __init__(self) -> None:
        self.now = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def test_one_waiter_continues_per_turn_in_order_of_arrival() -> None:
    turns, loop, went = ChunkTurns(), LoopCounter(), list[tuple[int, int]]()

    async def work(number: int) -> None:
        for _ in range(5):
            await turns.next()
            went.append((loop.now, number))

    await asyncio.gather(*(work(number) for number in range(4)))
    await loop.stop()
    assert max(Counter(turn for turn, _ in went).values()) == 1
    assert [number for _, number in went] == [0, 1, 2, 3] * 5


async def test_a_cancelled_waiter_delays_no_other() -> None:
    turns = ChunkTurns()
    waiting = [asyncio.create_task(turns.next()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    waiting[1].cancel()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await waiting[2]
        await turns.next()


async def test_many_snapshots_take_no_more_of_a_turn_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, chunks = Site(tmp_path), Counter[int]()
    await site.start()
    await site.work(20)
    loop = LoopCounter()
    original = SnapshotCursor.next_chunk

    def counted(walk: SnapshotCursor, max_blocks: int) -> list[BlockStored]:
        chunks[loop.now] += 1
        return original(walk, min(max_blocks, 8))

    monkeypatch.setattr(SnapshotCursor, "next_chunk", counted)

    async def watch(client: aio.AsyncClient) -> None:
        async for batch in client.watch("m", snapshot=True):
            if batch.kind is WatchKind.SNAPSHOT_END:
                return

    async with asyncio.timeout(DEADLINE_SECONDS):
        await asyncio.gather(*(watch(site.client) for _ in range(10)))
    await loop.stop()
    await site.stop()
    assert chunks.total() > 50
    assert max(chunks.values()) <= 2, "gRPC goes on with a task in the turn in which a write ends"
