"""EventService: see proto/kvpool/v1/event.proto for what each call promises."""

import grpc

from kvpool.server.core.errors import WrongStateError
from kvpool.server.rpc import convert
from kvpool.server.rpc.errors import errors_sent
from kvpool.server.rpc.hub import Hub, Stream
from kvpool.v1 import event_pb2, event_pb2_grpc

_WatchContext = grpc.aio.ServicerContext[event_pb2.WatchRequest, event_pb2.WatchResponse]


class EventService(event_pb2_grpc.EventServiceServicer):
    """The service, over a hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def Watch(self, request: event_pb2.WatchRequest, context: _WatchContext) -> None:  # type: ignore[override]
        async with errors_sent(context, "Watch"):
            with self._hub.streaming() as stream:
                await self._send_batches(request, stream, context)

    async def _send_batches(self, request: event_pb2.WatchRequest, stream: Stream, context: _WatchContext) -> None:
        pool = self._hub.allocator.pool(request.pool_name)
        if not pool.config.makes_events:
            raise WrongStateError("EVENTS_DISABLED", "the pool publishes no events", field="pool_name")
        log = self._hub.event_log(pool)
        sequence = request.from_sequence or log.last_sequence + 1
        log.check_start(sequence)
        await context.write(event_pb2.WatchResponse(sequence=sequence - 1))
        while True:
            with stream.wait():
                events = await log.get(sequence)
            await context.write(
                event_pb2.WatchResponse(sequence=sequence, events=[convert.event_to_proto(event) for event in events])
            )
            sequence += 1
