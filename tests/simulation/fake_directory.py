"""A server's connection to the directory of the cluster: a store in memory, on a host of its own.

A request that waits on a cut path, or whose answer is lost, has an unknown outcome: it may be applied much later.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

from kvpool.core.ids import PoolName
from kvpool.server.cluster.directory import Changes, DirectoryError, Entry, ShardName, ShardRecord, Swap
from simulation.network import Network, Pipe
from simulation.virtual_loop import current_process
from support.memory_directory import Store

DIRECTORY = "directory"
"""The host of the directory."""
_TIMEOUT_SECONDS = 1.0

_T = TypeVar("_T")


class FakeDirectory:
    """See `Directory`.

    Args:
        network: Carries requests and answers.
        store: The records.
    """

    def __init__(self, network: Network, store: Store) -> None:
        process = current_process()
        if process is None:
            raise RuntimeError("a process connects to the directory")
        self._there = Pipe(network, process.name, DIRECTORY)
        self._back = Pipe(network, DIRECTORY, process.name)
        self._store = store

    async def get(self, shard: ShardName) -> Entry:
        """See `Directory`."""
        return await self._call(partial(self._store.get, shard))

    async def compare_and_swap(self, shard: ShardName, revision: int, record: ShardRecord) -> Swap:
        """See `Directory`."""
        return await self._call(partial(self._store.swap, shard, revision, record))

    async def delete(self, shard: ShardName, revision: int) -> bool:
        """See `Directory`."""
        return await self._call(partial(self._store.delete, shard, revision))

    async def watch(self, shard: ShardName) -> AsyncIterator[Entry]:
        """See `Directory`."""
        seen = -1
        while True:
            changed = self._store.changed
            entry = await self._call(partial(self._store.watched, shard))
            if entry.revision > seen:
                seen = entry.revision
                yield entry
            await changed.wait()

    async def watch_all(self) -> AsyncIterator[Changes]:
        """See `Directory`. It yields the whole directory each time."""
        while True:
            changed = self._store.changed
            yield await self._call(self._store.all)
            await changed.wait()

    async def claim_pool(self, pool: PoolName, shard: ShardName) -> ShardName:
        """See `Directory`."""
        return await self._call(partial(self._store.claim, pool, shard))

    async def release_pool(self, pool: PoolName, shard: ShardName, revision: int) -> bool:
        """See `Directory`."""
        return await self._call(partial(self._store.release, pool, shard, revision))

    async def close(self) -> None:
        """See `Directory`."""

    async def _call(self, request: Callable[[], _T]) -> _T:
        answered: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def settle(answer: _T) -> None:
            if not answered.done():
                answered.set_result(answer)

        def apply() -> None:
            answer = request()
            self._back.send(lambda: settle(answer))

        self._there.send(apply)
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                return await answered
        except TimeoutError:
            raise DirectoryError(f"no answer in {_TIMEOUT_SECONDS:g} s") from None
