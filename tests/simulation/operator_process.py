"""An operator that lists and evicts sessions, drains pools and resets caches during a schedule."""

import asyncio
from collections.abc import Callable
from random import Random

import grpc

from kvpool.v1 import admin_pb2, admin_pb2_grpc

_DEADLINE_SECONDS = 1.0
_TRANSIT_SECONDS = 10.0
"""Longer than any message is in transit, on a path that was cut too."""


class Operator:
    """The operator's process."""

    def __init__(self, pool: str, address: str, random: Random, trace: Callable[..., None]) -> None:
        self._pool = pool
        self._random = random
        self._trace = trace
        self._stub: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(
            grpc.aio.insecure_channel(address)
        )

    async def act(self) -> None:
        """Does one action, which may be refused."""
        doing = self._random.choice((self._evict, self._evict, self._reset, self._drain))
        self._trace("operator: %s", doing.__name__)
        try:
            await doing()
        except grpc.RpcError as error:
            self._trace("operator: %s", error)

    async def _evict(self) -> None:
        request = admin_pb2.ListSessionsRequest(pool_name=self._pool)
        sessions = (await self._stub.ListSessions(request, timeout=_DEADLINE_SECONDS)).sessions
        if sessions:
            number = self._random.choice(sessions).session_number
            evict = admin_pb2.EvictSessionRequest(pool_name=self._pool, session_number=number)
            await self._stub.EvictSession(evict, timeout=_DEADLINE_SECONDS)

    async def _reset(self) -> None:
        request = admin_pb2.AdminServiceResetPrefixCacheRequest(pool_name=self._pool)
        await self._stub.ResetPrefixCache(request, timeout=_DEADLINE_SECONDS)

    async def _drain(self) -> None:
        try:
            await self._stub.Drain(admin_pb2.DrainRequest(pool_name=self._pool), timeout=_DEADLINE_SECONDS)
            await asyncio.sleep(self._random.random())
        except grpc.RpcError:  # the drain may still be in transit, or have succeeded without a response
            await asyncio.sleep(_TRANSIT_SECONDS)
            raise
        finally:
            await self._undrain()

    async def _undrain(self) -> None:
        while True:
            try:
                await self._stub.Undrain(admin_pb2.UndrainRequest(pool_name=self._pool), timeout=_DEADLINE_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return  # a restarted server has no drain, and no pool yet
                await asyncio.sleep(0.1)
            else:
                return
