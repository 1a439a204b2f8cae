"""An operator that lists and evicts sessions, drains pools and resets caches during a schedule."""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import grpc

from kvpool.v1 import admin_pb2, admin_pb2_grpc

_DEADLINE_SECONDS = 1.0
_TRANSIT_SECONDS = 10.0
"""Longer than any message is in transit, on a path that was cut too."""


class Operator:
    """The operator's process.

    Args:
        pool: The pool.
        addresses: The addresses of all servers.
        random: Decides what it does.
        trace: Called with each line of the trace.
    """

    def __init__(self, pool: str, addresses: tuple[str, ...], random: Random, trace: Callable[..., None]) -> None:
        self._pool = pool
        self._random = random
        self._trace = trace
        self._stubs: deque[admin_pb2_grpc.AdminServiceAsyncStub] = deque(
            admin_pb2_grpc.AdminServiceStub(grpc.aio.insecure_channel(address)) for address in addresses
        )

    async def act(self) -> None:
        """Does one action, which may be refused."""
        doings = [self._evict, self._evict, self._reset, self._drain]
        if len(self._stubs) > 1:
            doings += [self._hand_over, self._hand_over]
        doing = self._random.choice(doings)
        self._trace("operator: %s", doing.__name__)
        try:
            await doing()
        except grpc.RpcError as error:
            self._trace("operator: %s", error)

    async def _call(self, method: str, request: Any) -> Any:
        """Calls the primary: the first server that does not refuse it."""
        for _ in range(len(self._stubs)):
            try:
                return await getattr(self._stubs[0], method)(request, timeout=_DEADLINE_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                last = error
                self._stubs.rotate()
        raise last

    async def _hand_over(self) -> None:
        await self._call("HandOver", admin_pb2.HandOverRequest())

    async def _evict(self) -> None:
        request = admin_pb2.ListSessionsRequest(pool_name=self._pool)
        sessions = (await self._call("ListSessions", request)).sessions
        if sessions:
            number = self._random.choice(sessions).session_number
            evict = admin_pb2.EvictSessionRequest(pool_name=self._pool, session_number=number)
            await self._call("EvictSession", evict)

    async def _reset(self) -> None:
        request = admin_pb2.AdminServiceResetPrefixCacheRequest(pool_name=self._pool)
        await self._call("ResetPrefixCache", request)

    async def _drain(self) -> None:
        try:
            await self._call("Drain", admin_pb2.DrainRequest(pool_name=self._pool))
            await asyncio.sleep(self._random.random())
        except grpc.RpcError:  # the drain may still be in transit, or have succeeded without a response
            await asyncio.sleep(_TRANSIT_SECONDS)
            raise
        finally:
            await self._undrain()

    async def _undrain(self) -> None:
        while True:
            try:
                await self._call("Undrain", admin_pb2.UndrainRequest(pool_name=self._pool))
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return  # a restarted server has no drain, and no pool yet
                await asyncio.sleep(0.1)
            else:
                return
