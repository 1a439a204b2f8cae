"""The health and reflection services of gRPC's own packages, with a limited number of streams.

Their streams stay open as long as the client likes, and health needs no token. Without the limit, any client that can
connect could occupy all calls that the server accepts.
"""

from collections.abc import AsyncIterable, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvpool.core.errors import KvpoolError
from kvpool.server.limits.streams import StreamSlots
from kvpool.server.rpc import abort, errors_sent

MAX_HEALTH_WATCHES: Final = 64
MAX_REFLECTION_STREAMS: Final = 64


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # has no types
    """`grpc.health.v1`. A check needs no slot, so it is always answered."""

    def __init__(self) -> None:
        super().__init__()
        self._slots = StreamSlots(MAX_HEALTH_WATCHES, "TOO_MANY_STREAMS", "health watches")

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: ANN401 - of grpc
        try:
            with self._slots.hold():
                await super().Watch(request, context)
        except KvpoolError as error:
            await abort(context, error, "Watch")


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # has no types
    """`grpc.reflection.v1alpha` for the given services."""

    def __init__(self, service_names: Sequence[str]) -> None:
        super().__init__(service_names, descriptor_pool.Default())
        self._slots = StreamSlots(MAX_REFLECTION_STREAMS, "TOO_MANY_STREAMS", "reflection streams")

    async def ServerReflectionInfo(
        self,
        request_iterator: AsyncIterable[reflection_pb2.ServerReflectionRequest],
        unused_context: Any,  # noqa: ANN401 - of grpc
    ) -> AsyncIterable[reflection_pb2.ServerReflectionResponse]:
        async with errors_sent(unused_context, "ServerReflectionInfo"):
            with self._slots.hold():
                async for response in super().ServerReflectionInfo(request_iterator, unused_context):
                    yield response
