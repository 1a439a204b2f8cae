"""Watchers that join late, lag, lose messages and see server restarts end with exactly the server's prefix map.

Services and publisher are the real ones, in one event loop. The changes of the pool, the order of turns, the lost
messages, and the number of kept batches are random.
"""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zmq import Again

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
from kvpool.server.events import publisher
from kvpool.server.events.config import EventsConfig
from kvpool.server.events.publisher import EventPublisher
from kvpool.server.limits.streams import ChunkTurns
from kvpool.server.services import event_service
from kvpool.server.services.components import Components
from kvpool.server.services.event_service import EventService
from kvpool.v1 import event_pb2
from support.core import STEP, config, request_of
from support.events import Subscriber, truth
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


class LossyPublisher:
    """A publisher with lists as sockets, and subscribers that miss messages."""

    def __init__(self, server: RandomServer, subscribers: list[Subscriber], kept_batches: int) -> None:
        self.chance, self.subscribers = server.chance, subscribers
        self._requests: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.is_lossy = True
        sockets: Any = publisher.PublisherSockets(self, self)  # type: ignore[arg-type]
        options = EventsConfig(buffer_batches=kept_batches, heartbeat_seconds=0.0)
        self.publisher = EventPublisher(
            server.pool,
            server.log,
            options,
            server.parts.boot_id,
            sockets,
            turns=ChunkTurns(),
            confirmed=self._confirmed,
        )
        works = (self.publisher.publish(), self.publisher.serve_requests())
        self.tasks = [asyncio.create_task(work) for work in works]

    async def _confirmed(self) -> None:
        """Waits as for the standbys of a shard, or not."""
        await turns(self.chance.choice([0, 0, 1, 3]))

    def send_multipart(self, frames: tuple[bytes, ...], flags: int) -> Any:
        del flags
        if len(frames) == 3:
            for subscriber in self.subscribers:
                if not (self.is_lossy and self.chance.random() < 0.1):
                    subscriber.live(list(frames))
            return None
        done = asyncio.get_running_loop().create_future()
        if self.chance.random() < 0.05:
            done.set_exception(Again())
        else:
            self.subscribers[int(frames[0])].answer(list(frames[2:]))
            done.set_result(None)
        return done

    async def recv_multipart(self) -> list[bytes]:
        return await self._requests.get()

    def carry(self) -> None:
        """Delivers the requests of the subscribers."""
        for i, subscriber in enumerate(self.subscribers):
            while subscriber.asks:
                self._requests.put_nowait([str(i).encode(), b"", subscriber.asks.popleft()])

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def _small_chunks_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_service, "CHUNK_BLOCKS", 2)
    monkeypatch.setattr(publisher, "CHUNK_BLOCKS", 2)
    monkeypatch.setattr(publisher, "_PAUSE_SECONDS", 0.0)


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
    expected = {(g, block_hash) for g, block_hash, _ in server.pool.blocks.prefix_map.entries()}
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


async def subscribe(seed: int, specs: tuple[KVCacheSpec, ...], kept_batches: int) -> list[Subscriber]:
    chance = random.Random(seed)  # noqa: S311 - drawn by Hypothesis
    subscribers: list[Subscriber] = []
    server = RandomServer(chance, specs, kept_batches)
    wire = LossyPublisher(server, subscribers, kept_batches)
    for i in range(150):
        server.change()
        if i % 40 == chance.randrange(40):
            subscribers.append(Subscriber())
        if chance.random() < 0.005:
            await wire.end()
            server = RandomServer(chance, specs, kept_batches)
            wire = LossyPublisher(server, subscribers, kept_batches)
            for subscriber in subscribers:
                subscriber.ask_again()  # as a subscriber does that loses its connection
        if chance.random() < 0.5:
            wire.carry()
        await turns(chance.choice([0, 1, 2, 8]))
    wire.is_lossy = False
    while True:
        server.change()
        wire.carry()
        await turns(20)
        published = wire.publisher.counts.messages
        await turns(100)  # a publisher that repeats its snapshot would send more in these turns
        following = server.log.last_sequence + 1 == wire.publisher._next and published == wire.publisher.counts.messages
        if following and all(s.is_settled and s.next == wire.publisher.counts.messages for s in subscribers):
            break
    for subscriber in subscribers:
        assert subscriber.known == truth(server.pool)
    await wire.end()
    return subscribers


@bounded(settings().max_examples * 6 // 5)
@given(seed=st.integers(0, 2**32), specs=st.sampled_from(MIXES), kept_batches=st.sampled_from([2, 5, 50]))
def test_a_map_kept_over_zeromq_is_the_servers(seed: int, specs: tuple[KVCacheSpec, ...], kept_batches: int) -> None:
    asyncio.run(asyncio.wait_for(subscribe(seed, specs, kept_batches), DEADLINE_SECONDS))


async def test_the_random_runs_cover_every_way_to_recover() -> None:
    """Both repeated snapshots and replays must happen; without them the tests above would cover little."""
    watchers = [w for seed in range(5) for w in await watch_grpc(seed, MIXES[1], 5)]
    assert max(watcher.num_snapshots for watcher in watchers) > 1
    subscribers = [s for seed in range(5) for s in await subscribe(seed, MIXES[1], 50)]
    assert max(subscriber.num_snapshots for subscriber in subscribers) >= 1
    assert max(subscriber.num_replays for subscriber in subscribers) > 1
