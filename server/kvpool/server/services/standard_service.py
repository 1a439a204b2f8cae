"""Health and reflection as gRPC's own packages serve them, with a bounded number of streams.

Their streams stay open for as long as a client likes, and health asks for no token: without a bound, whoever can
connect could hold all calls that a server takes.
"""

from collections.abc import AsyncIterable, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvpool.core.errors import KvpoolError
from kvpool.server.limits.stream_slots import Room
from kvpool.server.rpc.guards import abort, errors_sent

MAX_HEALTH_WATCHES: Final = 64
MAX_REFLECTION_STREAMS: Final = 64


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # has no types
    """`grpc.health.v1`. A check needs no room, and so is always answered."""

    def __init__(self) -> None:
        super().__init__()
        self._room = Room(MAX_HEALTH_WATCHES, "TOO_MANY_STREAMS", "watches of health")

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: ANN401 - of grpc
        try:
            with self._room.taken():
                await super().Watch(request, context)
        except KvpoolError as error:
            await abort(context, error, "Watch")


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # likewise
    """`grpc.reflection.v1alpha` of some services."""

    def __init__(self, service_names: Sequence[str]) -> None:
        super().__init__(service_names, descriptor_pool.Default())
        self._room = Room(MAX_REFLECTION_STREAMS, "TOO_MANY_STREAMS", "streams of reflection")

    async def ServerReflectionInfo(
        self,
        request_iterator: AsyncIterable[reflection_pb2.ServerReflectionRequest],
        unused_context: Any,  # noqa: ANN401 - of grpc
    ) -> AsyncIterable[reflection_pb2.ServerReflectionResponse]:
        async with errors_sent(unused_context, "ServerReflectionInfo"):
            with self._room.taken():
                async for response in super().ServerReflectionInfo(request_iterator, unused_context):
                    yield response
