"""Watchers that join late, lag, lose connections and see server restarts end with exactly the server's prefix map.

The services are the real ones, in one event loop. The changes of the pool, the order of turns, the lost connections,
and the number of kept batches are random.
"""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.client.prefix_index import PrefixIndex
from kvpool.client.transports.resumable_watch import ResumableWatch
from kvpool.client.transports.transport import WatchOptions
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import KvpoolError, UnavailableError, WrongStateError
from kvpool.core.ids import BlockId
from kvpool.core.sessions.request import Request
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.server.config import ServerConfig
from kvpool.server.services import event_service
from kvpool.server.services.components import Components
from kvpool.server.services.event_service import EventService
from kvpool.v1 import event_pb2
from support.core import STEP, config, request_of
from support.router import announced
from support.waiting import DEADLINE_SECONDS

MIXES: list[tuple[KVCacheSpec, ...]] = [
    (FullAttentionSpec(4),),
    (FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=9)),
    (SlidingWindowSpec(8, sliding_window=9), FullAttentionSpec(4)),
    (FullAttentionSpec(4), MambaSpec(8)),
]


class RandomServer:
    """A server's parts with one pool, and requests that are added and freed."""

    def __init__(self, chance: random.Random, specs: tuple[KVCacheSpec, ...], kept_batches: int) -> None:
        self.chance = chance
        self.parts = Components(ServerConfig(max_pool_blocks=1000))
        self.pool = self.parts.pools.create(config(chance.choice([24, 40]), specs=specs, enable_events=True))[0]
        self.log = self.parts.event_logs[self.pool.config.name]
        self.log._max_batches = kept_batches
        self._requests: list[Request] = []

    def change(self) -> None:
        """Makes one random change, and publishes its events as the services do."""
        chance, pool = self.chance, self.pool
        match chance.choice(["admit"] * 6 + ["free"] * 4 + ["evict", "reset", "epoch"]):
            case "admit":
                content = "".join(chance.choice("ab") for _ in range(8))
                request = request_of(pool, content, chance.randrange(4, 33))
                if pool.admit(request, 32, sequence=STEP):
                    self._requests.append(request)
            case "free" if self._requests:
                pool.free(self._requests.pop(chance.randrange(len(self._requests))))
            case "evict":
                pool.blocks.evict_blocks([BlockId(chance.randrange(1, pool.blocks.num_blocks)) for _ in range(3)])
            case "reset":
                pool.reset_prefix_cache()
            case "epoch" if chance.random() < 0.2:
                self._requests.clear()
                pool.begin_epoch(
                    config(chance.choice([24, 40]), specs=_specs(pool), enable_events=True), pool.epoch + 1
                )
        self.parts.event_logs.publish(pool)


def _specs(pool: KVCacheManager) -> tuple[KVCacheSpec, ...]:
    return tuple(group.spec for group in pool.config.groups)


class FakeContext:
    """The context of one call; each write takes a random number of turns of the loop, as with a slow peer."""

    def __init__(self, chance: random.Random, inbox: "asyncio.Queue[event_pb2.WatchResponse]") -> None:
        self._chance = chance
        self._inbox = inbox

    async def write(self, message: event_pb2.WatchResponse) -> None:
        for _ in range(self._chance.choice([0, 0, 0, 1, 5])):
            await asyncio.sleep(0)
        self._inbox.put_nowait(message)


class Watcher:
    """A client's watch and index on the real service, whose connection is cut at times."""

    def __init__(self, servers: list[RandomServer], chance: random.Random) -> None:
        self.index = PrefixIndex()
        self.num_snapshots = 0
        self._servers = servers
        self._chance = chance
        self._resumable_watch = ResumableWatch(WatchOptions("m", snapshot=True))

    async def run(self) -> None:
        while True:
            try:
                await self._call()
            except KvpoolError as error:
                if self.index.boot_id:
                    self._resumable_watch.pause_seconds(error)
                else:  # no attempt succeeded, so the caller gets an error and starts a new watch
                    self._resumable_watch = ResumableWatch(WatchOptions("m", snapshot=True))
                await asyncio.sleep(0)

    async def _call(self) -> None:
        server, inbox = self._servers[-1], asyncio.Queue[event_pb2.WatchResponse]()
        context: Any = FakeContext(self._chance, inbox)
        call = asyncio.create_task(EventService(server.parts).Watch(self._resumable_watch.request(), context))
        try:
            while server is self._servers[-1] and (self._chance.random() > 0.01 or not self.index.is_whole):
                while inbox.empty() and not call.done() and server is self._servers[-1]:  # noqa: ASYNC110 - turns
                    await asyncio.sleep(0)
                if inbox.empty():
                    break
                batch = self._resumable_watch.read(inbox.get_nowait())
                if batch:
                    self.index.apply(batch)
                    self.num_snapshots += batch.kind.value == "snapshot_end"
        finally:
            call.cancel()
            (error,) = await asyncio.gather(call, return_exceptions=True)
        if isinstance(error, WrongStateError):  # the guard sends it
            raise error
        assert isinstance(error, asyncio.CancelledError)
        raise UnavailableError("CUT_OFF", "")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_service, "CHUNK_BLOCKS", 2)


def bounded(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def watch_grpc(seed: int, specs: tuple[KVCacheSpec, ...], kept_batches: int) -> list[Watcher]:
    chance = random.Random(seed)  # noqa: S311 - drawn by Hypothesis
    servers = [RandomServer(chance, specs, kept_batches)]
    watchers: list[Watcher] = []
    tasks: list[asyncio.Task[None]] = []
    for i in range(120):
        servers[-1].change()
        if i % 30 == chance.randrange(30):
            watchers.append(Watcher(servers, chance))
            tasks.append(asyncio.create_task(watchers[-1].run()))
        if chance.random() < 0.01:
            servers.append(RandomServer(chance, specs, kept_batches))
        await turns(chance.choice([0, 1, 2, 8]))
    server = servers[-1]
    expected = announced(server.pool)
    for watcher in watchers:
        index = watcher.index
        while (index.boot_id, index.sequence) != (server.parts.boot_id, server.log.last_sequence) or not index.is_whole:
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0)
        assert index.entries() == expected
        assert index.epoch == server.pool.epoch
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return watchers


@bounded(settings().max_examples * 6 // 5)
@given(seed=st.integers(0, 2**32), specs=st.sampled_from(MIXES), kept_batches=st.sampled_from([2, 5, 50]))
def test_an_index_over_grpc_is_the_servers_map(seed: int, specs: tuple[KVCacheSpec, ...], kept_batches: int) -> None:
    asyncio.run(asyncio.wait_for(watch_grpc(seed, specs, kept_batches), DEADLINE_SECONDS))


async def test_the_random_runs_cover_every_way_to_recover() -> None:
    """Watches must continue, and take repeated snapshots; otherwise the test above would cover little."""
    watchers = [w for seed in range(5) for w in await watch_grpc(seed, MIXES[1], 5)]
    assert max(watcher.num_snapshots for watcher in watchers) > 1
