"""Long work in small parts: one part per turn of the loop, for all waiters together."""

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.client import WatchKind, aio
from kvpool.client.aio import AsyncClient, AsyncSession
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.events import BlockStored
from kvpool.core.sessions.session import Session
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from kvpool.server.app import Server
from kvpool.server.config import ServerConfig
from kvpool.server.services.sessions import Sessions
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, event_pb2, event_pb2_grpc
from support.server import pool_config
from support.waiting import DEADLINE_SECONDS, until

WATCH = event_pb2.WatchRequest(pool_name="m", snapshot=True)


class Site:
    """A server in this process, and a session that keeps its pool busy."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder / 's'}"
        self._chance = random.Random(7)  # noqa: S311 - a workload
        self._count = 0

    async def start(self) -> None:
        self.server = Server(ServerConfig(addresses=(self.address,)))
        await self.server.start()
        self.client: AsyncClient = aio.connect(self.address)
        await self.client.create_pool(pool_config("m", 200, enable_events=True))
        self.session: AsyncSession = await self.client.open_session("m")

    async def stop(self) -> None:
        await self.client.close()
        await self.server.stop()

    async def work(self, count: int) -> None:
        """Admits and frees `count` requests: they share prefixes, use up all blocks, and evict hashes."""
        for _ in range(count):
            self._count += 1
            tokens = [self._chance.randrange(2)] * 20 + [self._count] * 100
            request = self.session.request(f"r{self._count}", tokens)
            assert await self.session.admit(request) is not None
            await self.session.free(request)


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Processor time that turns have taken, for the test to add to."""
    spent = [0.0]
    monkeypatch.setattr("kvpool.server.limits.fair_turns.time.thread_time", lambda: spent[0])
    return spent


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


async def test_snapshots_have_the_turns_of_one_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spent: list[float]
) -> None:
    """However many watches request one: here the steps of a session, each a tenth of a chunk, get as much time."""
    site, went = Site(tmp_path), list[str]()
    await site.start()
    await site.work(20)
    next_chunk, find = SnapshotCursor.next_chunk, Sessions.find

    def read(walk: SnapshotCursor, _: int) -> list[BlockStored]:
        went.append("chunk")
        spent[0] += 1.0
        return next_chunk(walk, 2)

    def found(sessions: Sessions, session_id: str) -> tuple[KVCacheManager, Session]:
        went.append("step")
        spent[0] += 0.1
        return find(sessions, session_id)

    monkeypatch.setattr(SnapshotCursor, "next_chunk", read)
    async with grpc.aio.insecure_channel(site.address) as channel, asyncio.timeout(DEADLINE_SECONDS):
        watches = [event_pb2_grpc.EventServiceStub(channel).Watch(WATCH) for _ in range(20)]
        for each in watches:
            await each.read()
        monkeypatch.setattr(Sessions, "find", found)
        stub: Any = allocator_pb2_grpc.AllocatorServiceStub(channel)
        request = allocator_pb2.MarkExecutedRequest(session_id=site.session.session_id)
        site.server.components.turns.hold()
        calls = [asyncio.ensure_future(stub.MarkExecuted(request)) for _ in range(100)]
        await until(lambda: went.count("step") == len(calls))  # each looks up its session before it waits for its turn
        went.clear()
        site.server.components.turns.resume()
        await asyncio.gather(*calls)
    await site.stop()
    steps = went[: len(went) - went[::-1].index("step")]
    assert steps.count("step") == len(calls)
    assert 0 < steps.count("chunk") < len(calls) / 4


async def test_many_snapshots_take_no_more_of_a_turn_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spent: list[float]
) -> None:
    site, chunks = Site(tmp_path), Counter[int]()
    await site.start()
    await site.work(20)
    loop = LoopCounter()
    original = SnapshotCursor.next_chunk

    def counted(walk: SnapshotCursor, max_blocks: int) -> list[BlockStored]:
        chunks[loop.now] += 1
        spent[0] += 1.0
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
