"""The lower bound of a step's cost: empty messages both ways, on the same kind of stream as a session's."""

import asyncio
import queue
from collections.abc import Callable
from typing import Final

import grpc

from benchmarks.workloads import Micros, Stopwatch
from kvpool.server.config import ServerConfig
from kvpool.wire.channels import SESSION_CHANNEL_OPTIONS, server_channel_options

_SERVICE: Final = "benchmarks.Echo"
_METHOD: Final = "Echo"


async def serve_echo(addresses: tuple[str, ...], ready: Callable[[list[str]], None]) -> None:
    """Serves a stream that echoes messages, with the channel options of a kvpool server."""
    config = ServerConfig(addresses=addresses)
    limits = config.limits
    options = server_channel_options(
        config.max_message_bytes, config.dead_peer_seconds, limits.max_sessions, limits.stall_seconds
    )
    server = grpc.aio.server(options=options)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {_METHOD: grpc.stream_stream_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    bound = []
    for address in addresses:
        port = server.add_insecure_port(address)
        bound.append(address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}")
    await server.start()
    ready(bound)
    await asyncio.get_running_loop().create_future()


async def _echo(_: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
    while isinstance(message := await context.read(), bytes):
        await context.write(message)


class Echo:
    """Timed empty round trips on one stream of the synchronous client. See `Workload`."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=SESSION_CHANNEL_OPTIONS)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
        self._call = method(iter(self._outgoing.get, None))
        self._exchange()

    def round(self, count: int) -> Micros:
        """See `Workload`."""
        watch = Stopwatch()
        for _ in range(count):
            watch.time("echo_stream", self._exchange)
        return watch.micros

    def close(self) -> None:
        """See `Workload`."""
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()

    def _exchange(self) -> None:
        self._outgoing.put(b"")
        next(self._call)
