"""The service of all servers of a cluster: finds the shard of each pool.

A session uses the transport of its shard directly, so nothing here is on the path of a step.

1. A client asks for the shard of a pool once, and keeps the answer and one transport per shard.
2. If the shard answers that it does not have the pool, the client asks once more. If the shard cannot be reached, the
   next call asks again, as its servers may have been replaced.
3. A server that belongs to no cluster, or is too old to say so, has all pools: its pools are at the seeds.
"""

import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, Final, Generic, TypeVar

from kvpool.client.primary_connection import closed_error
from kvpool.client.transports.grpc import GrpcTransport
from kvpool.client.transports.transport import EventBatch, OpenedSession, SessionOptions, WatchOptions
from kvpool.core.errors import KvpoolError, NotFoundError, UnavailableError
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.views.pool_info import PoolInfo
from kvpool.v1 import directory_pb2
from kvpool.wire.backoff import Backoff
from kvpool.wire.seeds import NO_PRIMARY, OTHER_SHARD, ShardAddress, is_unreachable

_MIN_CALL_SECONDS: Final = 0.001
_MIN_ASK_SECONDS: Final = 2.0
"""Least time to ask for a pool, while the client waits for it."""
_NO_POOL: Final = "POOL_NOT_FOUND"

_TransportT = TypeVar("_TransportT", bound=GrpcTransport)
_T = TypeVar("_T")


class ClusterService(Generic[_TransportT]):
    """See `Service`. Keeps one transport per shard whose pools are named. Threads may share it."""

    def __init__(self, seeds: _TransportT, zone: str = "") -> None:
        """Makes no call.

        Args:
            seeds: The transport to the addresses of the client. They may belong to servers of different shards.
            zone: The zone whose shards are preferred for new pools; empty for none.
        """
        self._seeds = seeds
        self._zone = zone
        self._lock = threading.Lock()
        self._shards: dict[str, _TransportT] = {}
        self._pools: dict[str, _TransportT] = {}
        self._is_closed = False

    @property
    def target(self) -> str:
        """See `Service`."""
        return self._seeds.target

    async def create_pool(self, config: PoolConfig, memory_id: str = "") -> PoolInfo:
        """See `Service`."""
        place = directory_pb2.PlaceRequest(pool_name=config.name, zone=self._zone)
        return await self.call(
            config.name, lambda shard, seconds: shard.create_pool(config, memory_id, seconds), place=place
        )

    async def get_pool(self, name: str) -> PoolInfo:
        """See `Service`."""
        return await self.call(name, lambda shard, seconds: shard.get_pool(name, seconds))

    async def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """See `Service`. Waits also while no shard has the pool."""
        due_seconds = time.monotonic() + timeout_seconds
        left_seconds, backoff = timeout_seconds, Backoff(0.1, 0.5)
        while True:
            try:
                shard = await self._locate(name, max(left_seconds, _MIN_ASK_SECONDS))
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
        return await self.call(options.pool, lambda shard, seconds: shard.open_session(options, seconds))

    async def resume_session(self, session_id: str, sequence: int, pool: str = "") -> OpenedSession:
        """See `Service`. If the pool is not known, asks each shard until one has the session, or does not answer."""
        if pool:
            return await self.call(
                pool, lambda shard, seconds: shard.resume_session(session_id, sequence, pool, seconds)
            )
        refusal: KvpoolError = UnavailableError("NO_SHARD", "no shard of the cluster has a primary now")
        left_seconds = _time_limit(self._seeds.deadline_seconds)
        request = directory_pb2.ListShardsRequest()
        for location in await self._seeds.ask("ListShards", request, left_seconds(), _shards_of, [ShardAddress()]):
            shard = self._shard(location)
            try:
                return await shard.resume_session(session_id, sequence, pool, left_seconds())
            except NotFoundError as error:
                refusal = error
        raise refusal

    async def watch(self, options: WatchOptions) -> AsyncGenerator[EventBatch]:
        """See `Service`. A watch with a snapshot follows a pool that is created again in another shard."""
        find = partial(self._locate, options.pool, _MIN_ASK_SECONDS)
        return await self.call(options.pool, lambda shard, seconds: shard.watch(options, seconds, find))

    async def close(self) -> None:
        """See `Service`."""
        with self._lock:
            self._is_closed = True
            shards = (*self._shards.values(), self._seeds)
        for shard in shards:
            await shard.close()

    async def call(
        self,
        pool: str,
        call: Callable[[_TransportT, float], Awaitable[_T]],
        *,
        place: directory_pb2.PlaceRequest | None = None,
        deadline_seconds: float = 0.0,
    ) -> _T:
        """Makes a call at the shard of a pool. All of it shares one deadline.

        Args:
            pool: The pool; empty for the shard of the addresses of the client.
            call: Makes the call at a shard, within the seconds that it is given. It is repeated because of rule 2.
            place: Has a shard chosen for a pool that none has.
            deadline_seconds: Time limit; 0 for the client's.

        Raises:
            UnavailableError: The servers do not agree which shard has the pool (NOT_LOCATED), or the token may not be
                sent to the shard (NO_ACCESS).
            KvpoolError: The error of the call, or of the question for the shard.
        """
        left_seconds = _time_limit(deadline_seconds or self._seeds.deadline_seconds)
        known, is_again = self._pools.get(pool) if pool else self._seeds, False
        while True:
            try:
                return await call(known or await self._locate(pool, left_seconds(), place), left_seconds())
            except KvpoolError as error:
                if error.reason in (_NO_POOL, OTHER_SHARD, NO_PRIMARY) or is_unreachable(error):
                    self._pools.pop(pool, None)
                if is_again and error.reason == OTHER_SHARD:
                    message = f"the servers do not agree now which shard has pool {pool!r}: {error}"
                    raise UnavailableError("NOT_LOCATED", message, retry_seconds=1.0) from None
                has_moved = error.reason == OTHER_SHARD or (known and error.reason == _NO_POOL)
                if is_again or not (pool and has_moved):
                    raise
            known, is_again = None, True

    async def ask(self, method: str, request: object, read: Callable[[Any, str], _T], default: _T) -> _T:
        """Asks any server. See `GrpcTransport.ask`."""
        return await self._seeds.ask(method, request, self._seeds.deadline_seconds, read, default)

    async def _locate(self, pool: str, seconds: float, place: directory_pb2.PlaceRequest | None = None) -> _TransportT:
        """Asks any server for the shard of a pool, and remembers it. Raises NotFoundError if no shard has it."""
        method, request = ("Place", place) if place else ("Locate", directory_pb2.LocateRequest(pool_name=pool))
        found = self._shard(await self._seeds.ask(method, request, seconds, _shard_of, ShardAddress()))
        self._pools[pool] = found
        return found

    def _shard(self, location: ShardAddress) -> _TransportT:
        """Returns the transport to a shard."""
        if not location.shard:
            return self._seeds
        with self._lock:
            if self._is_closed:
                raise closed_error()
            known = self._shards.get(location.shard)
            if known is None:
                try:
                    known = self._shards[location.shard] = self._seeds.at_shard(location.shard, location.addresses)
                except ValueError as error:
                    raise UnavailableError("NO_ACCESS", str(error)) from None
        known.connection.learn_members(location.addresses)
        return known


def _time_limit(seconds: float) -> Callable[[], float]:
    """Begins a deadline. Returns a function that returns the seconds that are left."""
    due_seconds = time.monotonic() + seconds
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
