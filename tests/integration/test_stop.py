"""A stop of the server waits for its open calls."""

import asyncio
from pathlib import Path

from kvpool.server.app import Server
from kvpool.server.config import ServerConfig


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
