"""Implements EventService; proto/kvpool/v1/event.proto documents its protocol."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import InvalidArgumentError, WrongStateError, check_range
from kvpool.core.events import BlockEvent
from kvpool.core.views.event_log import LoggedBatch
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from kvpool.server.events.log import LiveEventLog
from kvpool.server.limits.fair_turns import FairTurns
from kvpool.server.limits.streams import Context, StreamSlots, StreamWriter
from kvpool.server.services.calls import OpenCall
from kvpool.server.services.components import Components
from kvpool.v1 import event_pb2, event_pb2_grpc
from kvpool.wire import steps as wire_steps
from kvpool.wire.protocol_version import PROTOCOL_VERSION, check_client

CHUNK_BLOCKS: Final = 256
"""Blocks per snapshot message. A step waits for at most one such message, however many watches start."""
SNAPSHOTS: Final = "snapshots"
"""All snapshots of a pool together have the turns of one session."""

MAX_RECENT_MESSAGES: Final = 64
"""Number of batches whose encoded messages are kept for watches that keep up."""

_MIN_HEARTBEAT_SECONDS: Final = 0.1
_MAX_HEARTBEAT_SECONDS: Final = 3600.0


class EventService(event_pb2_grpc.EventServiceServicer):
    """The service of one server."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts
        self._slots = StreamSlots(parts.config.limits.max_watches, "TOO_MANY_WATCHES", "watches")
        self._messages = _BatchMessages(parts.boot_id)

    async def Watch(self, request: event_pb2.WatchRequest, context: Context) -> None:  # type: ignore[override]
        with (
            self._parts.calls.open() as call,
            self._slots.hold(),
            StreamWriter(context, self._parts.config.limits.stall_seconds) as writer,
        ):
            await self._watch(request, call, writer).run()

    def _watch(self, request: event_pb2.WatchRequest, call: OpenCall, writer: StreamWriter) -> "_Watch":
        check_client(request.protocol_version)
        pool = self._parts.state.pools.get(request.pool_name)
        if not pool.config.makes_events:
            raise WrongStateError("EVENTS_DISABLED", "the pool publishes no events", field="pool_name")
        if request.heartbeat_seconds and not (
            _MIN_HEARTBEAT_SECONDS <= request.heartbeat_seconds <= _MAX_HEARTBEAT_SECONDS
        ):
            message = f"{request.heartbeat_seconds} is neither 0 nor in [0.1, 3600]"
            raise InvalidArgumentError("heartbeat_seconds", message)
        log = self._parts.event_logs[pool.config.name]
        if request.snapshot:
            check_range("from_sequence", request.from_sequence, 0, 0)
        elif request.boot_id not in ("", self._messages.boot_id):
            message = "the server was restarted; its batches are different"
            raise WrongStateError("EVENTS_NOT_KEPT", message, field="boot_id")
        sequence = request.from_sequence or log.last_sequence + 1
        log.check_start(sequence)
        return _Watch(self._messages, self._parts.turns, pool, log, request, call, writer, sequence)


class _BatchMessages:
    """Encoded messages of the newest batches, made once for all watches.

    Attributes:
        boot_id: Id of the server process, sent with each message.
    """

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self._recent: OrderedDict[int, tuple[LoggedBatch, event_pb2.WatchResponse]] = OrderedDict()

    def of(self, batch: LoggedBatch) -> event_pb2.WatchResponse:
        """Returns the message of a batch. The caller must not change it."""
        made = self._recent.get(id(batch))  # the entry keeps the batch alive, so its id stays unique
        if made:
            return made[1]
        message = event_pb2.WatchResponse(
            sequence=batch.sequence,
            events=map(wire_steps.event_to_proto, batch.events),
            kind=event_pb2.WATCH_RESPONSE_KIND_BATCH,
            epoch=batch.epoch,
            boot_id=self.boot_id,
            time_seconds=batch.time_seconds,
        )
        self._recent[id(batch)] = batch, message
        if len(self._recent) > MAX_RECENT_MESSAGES:
            self._recent.popitem(last=False)
        return message


@dataclass(slots=True)
class _Watch:
    """One open watch; `next_sequence` is the number of the batch that is sent next."""

    messages: _BatchMessages
    turns: FairTurns
    pool: KVCacheManager
    log: LiveEventLog
    request: event_pb2.WatchRequest
    call: OpenCall
    writer: StreamWriter
    next_sequence: int

    async def run(self) -> None:
        """Sends the snapshot, if requested, and then the batches as they come. Runs indefinitely."""
        await self._send_now(event_pb2.WATCH_RESPONSE_KIND_START)
        if self.request.snapshot:
            await self._send_snapshot()
        while True:
            try:
                with self.call.wait():
                    async with asyncio.timeout(self.request.heartbeat_seconds or None):
                        batch = await self.log.get(self.next_sequence)
            except TimeoutError:
                await self._send_now(event_pb2.WATCH_RESPONSE_KIND_HEARTBEAT)
            else:
                await self._send_batch(batch)

    async def _send_snapshot(self) -> None:
        """Sends the cached blocks in chunks, interleaved with the batches that come meanwhile.

        Each chunk is read in a turn, and sent after the batches that existed then.
        """
        cursor, is_done = SnapshotCursor(self.pool), False
        while not is_done:
            with self.call.wait():
                await self.turns.take(self.pool.config.name, SNAPSHOTS)
            try:
                position, is_done = self.log.last_sequence, cursor.is_done
                chunk = () if is_done else cursor.next_chunk(CHUNK_BLOCKS)
                message = self._message(event_pb2.WATCH_RESPONSE_KIND_SNAPSHOT, position, chunk) if chunk else None
            finally:
                self.turns.end()
            while self.next_sequence <= position:
                await self._send_batch(self.log.kept(self.next_sequence))
            if message:
                await self.writer.write(message)
        await self._send_now(event_pb2.WATCH_RESPONSE_KIND_SNAPSHOT_END)

    async def _send_now(self, kind: event_pb2.WatchResponseKind.ValueType) -> None:
        await self.writer.write(self._message(kind, self.next_sequence - 1))

    def _message(
        self, kind: event_pb2.WatchResponseKind.ValueType, position: int, events: Sequence[BlockEvent] = ()
    ) -> event_pb2.WatchResponse:
        """Makes a message that follows batch `position`."""
        return event_pb2.WatchResponse(
            sequence=position,
            events=map(wire_steps.event_to_proto, events),
            kind=kind,
            protocol_version=PROTOCOL_VERSION if kind == event_pb2.WATCH_RESPONSE_KIND_START else 0,
            epoch=self.pool.epoch,
            boot_id=self.messages.boot_id,
            time_seconds=time.time(),
        )

    async def _send_batch(self, batch: LoggedBatch) -> None:
        await self.writer.write(self.messages.of(batch))
        self.next_sequence = batch.sequence + 1
