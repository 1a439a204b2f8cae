"""A server in the test's process that publishes events, and a session that keeps its pool busy."""

import random
from pathlib import Path

from kvpool.client import aio
from kvpool.client.aio import AsyncClient, AsyncSession
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName
from kvpool.server.app import Server
from kvpool.server.config import ServerConfig
from kvpool.server.events.config import EventsConfig
from kvpool.server.events.publisher import EventPublisher
from support.server import pool_config


class Site:
    """A server in this process at fixed addresses, and a session that keeps its pool busy."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.address = f"unix:{folder / 's'}"
        self.events = EventsConfig(f"ipc://{folder / 'e'}", f"ipc://{folder / 'r'}", **options)  # type: ignore[arg-type]
        self._chance = random.Random(7)  # noqa: S311 - a workload
        self._count = 0

    async def start(self, pools: tuple[str, ...] = ("m",)) -> None:
        self.server = Server(ServerConfig(addresses=(self.address,), events=self.events))
        await self.server.start()
        self.client: AsyncClient = aio.connect(self.address)
        for name in pools:
            await self.client.create_pool(pool_config(name, 200, enable_events=True))
        self.session: AsyncSession = await self.client.open_session(pools[0])

    async def stop(self) -> None:
        await self.client.close()
        await self.server.stop()

    @property
    def pool(self) -> KVCacheManager:
        return self.server.components.state.pools.get("m")

    @property
    def publisher(self) -> EventPublisher:
        publishers = self.server.components.publishers
        assert publishers
        return publishers.by_pool[PoolName("m")]

    async def work(self, count: int) -> None:
        """Admits and frees `count` requests: they share prefixes, use up all blocks, and evict hashes."""
        for _ in range(count):
            self._count += 1
            tokens = [self._chance.randrange(2)] * 20 + [self._count] * 100
            request = self.session.request(f"r{self._count}", tokens)
            assert await self.session.admit(request) is not None
            await self.session.free(request)
