"""The service of all servers of a cluster: finds the shard of each pool.

A session uses the transport of its shard directly, so nothing here is on the path of a step.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

from kvpool.client.shards import Shards, default_if_unimplemented
from kvpool.client.transports.grpc import GrpcTransport
from kvpool.client.transports.transport import EventBatch, OpenedSession, SessionOptions, WatchOptions
from kvpool.core.errors import KvpoolError, NotFoundError, UnavailableError
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.views.pool_info import PoolInfo
from kvpool.v1 import directory_pb2
from kvpool.wire.backoff import Backoff
from kvpool.wire.seeds import ShardAddress

_MIN_CALL_SECONDS: Final = 0.001
_MIN_ASK_SECONDS: Final = 2.0
"""Least time to ask for a pool, while the client waits for it."""

_T = TypeVar("_T")


class ClusterService:
    """See `Service`. Keeps one transport per shard whose pools are named."""

    def __init__(self, seeds: GrpcTransport, zone: str = "") -> None:
        """Makes no call.

        Args:
            seeds: The transport to the addresses of the client. They may belong to servers of different shards.
            zone: The zone whose shards are preferred for new pools; empty for none.
        """
        self._seeds = seeds
        self._zone = zone
        self._shards: Shards[GrpcTransport] = Shards(seeds, seeds.at_shard)

    @property
    def target(self) -> str:
        """See `Service`."""
        return self._seeds.target

    async def create_pool(self, config: PoolConfig, memory_id: str = "") -> PoolInfo:
        """See `Service`."""
        place = partial(self._place, config.name)
        return await self._call(
            config.name, lambda shard, seconds: shard.create_pool(config, memory_id, seconds), place
        )

    async def get_pool(self, name: str) -> PoolInfo:
        """See `Service`."""
        return await self._call(name, lambda shard, seconds: shard.get_pool(name, seconds))

    async def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """See `Service`. Waits also while no shard has the pool."""
        due_seconds = time.monotonic() + timeout_seconds
        left_seconds, backoff = timeout_seconds, Backoff(0.1, 0.5)
        while True:
            locate = partial(self._locate, name, max(left_seconds, _MIN_ASK_SECONDS))
            try:
                shard = await self._shards.locate(name, locate)
                left_seconds = max(due_seconds - time.monotonic(), 0.0)
                return await shard.wait_until_ready(name, timeout_seconds, left_seconds)
            except (NotFoundError, UnavailableError) as error:
                left_seconds = due_seconds - time.monotonic()
                if left_seconds <= 0:
                    raise
                wait_seconds = min(backoff.next(error.retry_seconds or None), left_seconds)
            await self._seeds.sleep(wait_seconds)
            left_seconds = max(due_seconds - time.monotonic(), 0.0)

    async def open_session(self, options: SessionOptions) -> OpenedSession:
        """See `Service`."""
        return await self._call(options.pool, lambda shard, seconds: shard.open_session(options, seconds))

    async def resume_session(self, session_id: str, sequence: int, pool: str = "") -> OpenedSession:
        """See `Service`. If the pool is not known, asks each shard until one has the session, or does not answer."""
        if pool:
            return await self._call(
                pool, lambda shard, seconds: shard.resume_session(session_id, sequence, pool, seconds)
            )
        refusal: KvpoolError = UnavailableError("NO_SHARD", "no shard of the cluster has a primary now")
        left_seconds = self._time_limit()
        for location in await default_if_unimplemented([ShardAddress()], partial(self._list_shards, left_seconds())):
            shard = self._shards.connection(location)
            try:
                return await shard.resume_session(session_id, sequence, pool, left_seconds())
            except NotFoundError as error:
                refusal = error
        raise refusal

    async def watch(self, options: WatchOptions) -> AsyncGenerator[EventBatch]:
        """See `Service`. A watch with a snapshot follows a pool that is created again in another shard."""
        locate = partial(self._locate, options.pool, _MIN_ASK_SECONDS)
        find = partial(self._shards.locate, options.pool, locate)
        return await self._call(options.pool, lambda shard, seconds: shard.watch(options, seconds, find))

    async def close(self) -> None:
        """See `Service`."""
        for shard in self._shards.end():
            await shard.close()

    async def _locate(self, pool: str, seconds: float) -> ShardAddress:
        """Asks any server for the shard of a pool. Raises NotFoundError if no shard has it."""
        return await self._seeds.ask("Locate", directory_pb2.LocateRequest(pool_name=pool), seconds, _shard_of)

    async def _place(self, pool: str, seconds: float) -> ShardAddress:
        """Asks any server for the shard of a pool, and to choose one if it has none."""
        request = directory_pb2.PlaceRequest(pool_name=pool, zone=self._zone)
        return await self._seeds.ask("Place", request, seconds, _shard_of)

    async def _list_shards(self, seconds: float) -> list[ShardAddress]:
        """Asks any server for the shards that have had a primary."""
        return await self._seeds.ask("ListShards", directory_pb2.ListShardsRequest(), seconds, _shards_of)

    async def _call(
        self,
        pool: str,
        call: Callable[[GrpcTransport, float], Awaitable[_T]],
        locate: Callable[[float], Awaitable[ShardAddress]] | None = None,
    ) -> _T:
        """Makes a call at the shard of a pool, which `locate` finds or chooses. All of it shares one deadline."""
        left_seconds, find = self._time_limit(), locate or partial(self._locate, pool)
        return await self._shards.call(pool, lambda: find(left_seconds()), lambda shard: call(shard, left_seconds()))

    def _time_limit(self) -> Callable[[], float]:
        """Begins a deadline. Returns a function that returns the seconds that are left."""
        due_seconds = time.monotonic() + self._seeds.deadline_seconds
        return lambda: max(due_seconds - time.monotonic(), _MIN_CALL_SECONDS)


def _shard_of(answer: directory_pb2.LocateResponse | directory_pb2.PlaceResponse, address: str) -> ShardAddress:
    return ShardAddress.of(answer.shard, answer.addresses, address if answer.is_own else "")


def _shards_of(answer: directory_pb2.ListShardsResponse, _: str) -> list[ShardAddress]:
    return [
        ShardAddress.of(
            shard.name,
            (*shard.primary_addresses, *(address for member in shard.members for address in member.addresses)),
        )
        for shard in answer.shards
        if shard.term or not shard.name
    ]
