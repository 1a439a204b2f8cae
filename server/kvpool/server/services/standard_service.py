"""The health and reflection services of gRPC's own packages, with a limited number of streams.

Their streams stay open as long as the client likes, and health needs no token. Without the limit, any client that can
connect could occupy all calls that the server accepts.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Final

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from kvpool.server.limits.streams import Context, StreamSlots
from kvpool.server.services.calls import Calls, OpenCall

MAX_HEALTH_WATCHES: Final = 64
MAX_REFLECTION_STREAMS: Final = 64


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # has no types
    """`grpc.health.v1`. A check needs no slot, so it is always answered."""

    def __init__(self) -> None:
        super().__init__()
        self._slots = StreamSlots(MAX_HEALTH_WATCHES, "TOO_MANY_STREAMS", "health watches")

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        with self._slots.hold():
            await super().Watch(request, context)


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # has no types
    """`grpc.reflection.v1alpha` for the given services. Its streams are open calls of the server."""

    def __init__(self, service_names: Sequence[str], calls: Calls) -> None:
        super().__init__(service_names, descriptor_pool.Default())
        self._calls = calls
        self._slots = StreamSlots(MAX_REFLECTION_STREAMS, "TOO_MANY_STREAMS", "reflection streams")

    async def ServerReflectionInfo(self, _: object, context: Context) -> None:
        with self._slots.hold(), self._calls.open() as call:
            async for response in super().ServerReflectionInfo(_requests(call, context), context):
                await context.write(response)


async def _requests(call: OpenCall, context: Context) -> AsyncIterator[object]:
    while True:
        with call.wait():
            request = await context.read()
        if request is grpc.aio.EOF:
            return
        yield request
