"""A stop of the server waits for its open calls."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.client import aio, connect
from kvpool.server.app import Server
from kvpool.server.config import ServerConfig
from support.server import pool_config
from support.waiting import DEADLINE_SECONDS


async def test_a_stop_waits_for_a_call_whose_client_has_gone(tmp_path: Path) -> None:
    server = Server(ServerConfig(addresses=(f"unix:{tmp_path / 's'}",)))
    await server.start()
    is_open = asyncio.Event()

    async def handle() -> None:
        with server.components.calls.open():
            is_open.set()
            await asyncio.sleep(0.3)  # gRPC knows nothing of it, as of a call whose client disconnected

    handler = asyncio.create_task(handle())
    await is_open.wait()
    await server.stop()
    assert handler.done()


class Cancelling(grpc.GenericRpcHandler):
    """Cancels each call, as gRPC does when the grace time of a stop is over."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()

    def service(self, _: object) -> "grpc.RpcMethodHandler[Any, Any]":
        return grpc.unary_unary_rpc_method_handler(self._cancel)

    async def _cancel(self, _: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        self.arrived.set()
        await context.abort(grpc.StatusCode.CANCELLED, "")


async def create_pool(address: str) -> int:
    async with aio.connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        return (await client.create_pool(pool_config())).config.num_blocks


async def create_pool_blocking(address: str) -> int:
    def create() -> int:
        with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
            return client.create_pool(pool_config()).config.num_blocks

    return await asyncio.to_thread(create)


@pytest.mark.parametrize("call", [create_pool, create_pool_blocking])
async def test_a_call_that_a_server_cancels_is_repeated(tmp_path: Path, call: Callable[[str], Awaitable[int]]) -> None:
    address, cancelling = f"unix:{tmp_path / 's'}", Cancelling()
    stopped = grpc.aio.server()
    stopped.add_generic_rpc_handlers((cancelling,))
    stopped.add_insecure_port(address)
    await stopped.start()
    answer = asyncio.ensure_future(call(address))
    await cancelling.arrived.wait()
    await stopped.stop(None)
    server = Server(ServerConfig(addresses=(address,)))
    await server.start()
    try:
        assert await answer == pool_config().num_blocks
    finally:
        await server.stop()
