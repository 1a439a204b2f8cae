"""Publisher of one pool's block events over ZeroMQ, as one vLLM engine publishes them, with heartbeats and snapshots.

1. Messages are numbered from 0 without gaps, heartbeats included. The first message is AllBlocksCleared.
2. The publisher runs in the server's event loop, after the step that made the events was answered. A thread would hold
   the interpreter's lock for as long, and return it to the steps later (switch interval, 5 ms).
3. The publisher never waits for a subscriber. ZeroMQ drops messages of a slow one beyond `buffer_batches`. That
   subscriber sees the gap in the numbers and requests a replay or, if that is too late, a snapshot.
4. A snapshot begins when all events so far are published. Its parts, followed by all messages from the number in its
   header, give the exact content of the prefix cache (see `kvpool.core.views.snapshot_cursor`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import WrongStateError
from kvpool.core.events import AllBlocksCleared, BlockEvent
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.views.event_log import KEPT_BYTES
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from kvpool.server.events.config import EventsConfig, ReplayFraming
from kvpool.server.events.log import LiveEventLog
from kvpool.server.events.vllm_format import EventEncoder
from kvpool.server.limits.streams import ChunkTurns
from kvpool.server.metrics.observations import PublisherCounts

STATUS_REQUEST: Final = b"kvpool.status.v1"
SNAPSHOT_REQUEST: Final = b"kvpool.snapshot.v1"
"""Sent in place of the start sequence. No vLLM client sends these, because they are not 8 bytes."""

STATUS, SNAPSHOT_BEGIN, SNAPSHOT_BLOCKS, SNAPSHOT_END = b"status", b"begin", b"blocks", b"end"
SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
CHUNK_BLOCKS: Final = 256
_BATCHES_PER_TURN: Final = 16
_REPLIES_PER_TURN: Final = 16
_MAX_REQUESTS: Final = 8
_REQUEST_FRAMES: Final = 3
_PAUSE_SECONDS: Final = 0.01
_STUCK_SECONDS: Final = 10.0

_log = logging.getLogger("kvpool.server")


class PeerClosedError(Exception):
    """The requesting peer disconnected, or reads no replies."""


@dataclass(frozen=True, slots=True)
class PublisherSockets:
    """Sockets of a publisher.

    Attributes:
        publish: A PUB socket, bound or connected.
        replay: A ROUTER socket, bound; None if replays and snapshots are not served.
    """

    publish: zmq.Socket[bytes]
    replay: zmq.asyncio.Socket | None


Confirmed = Callable[[], Awaitable[None]]
"""Waits until the standbys of a shard have every change so far."""


async def at_once() -> None:
    """The wait of a server without standbys."""


class EventPublisher:
    """Publishes the events of one pool, in one event loop.

    Attributes:
        counts: Counts for metrics; `counts.messages` is also the number of the next message.
    """

    def __init__(  # noqa: PLR0913 - constructed in one place
        self,
        pool: KVCacheManager,
        log: LiveEventLog,
        settings: EventsConfig,
        boot_id: str,
        sockets: PublisherSockets,
        *,
        turns: ChunkTurns,
        confirmed: Confirmed = at_once,
    ) -> None:
        self.counts = PublisherCounts()
        self._pool = pool
        self._log = log
        self._settings = settings
        self._boot_id = boot_id
        self._turns = turns
        self._confirmed = confirmed
        self._publish_socket, self._replay_socket = sockets.publish, sockets.replay
        self._name = pool.config.name
        self._topic = settings.topic_of(pool.config.name).encode()
        self._encoder = EventEncoder(settings)
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._next = log.last_sequence + 1
        self._requests: set[asyncio.Task[None]] = set()
        self._free_requests = asyncio.Semaphore(_MAX_REQUESTS)

    async def publish(self) -> None:
        """Publishes events indefinitely."""
        while True:
            try:
                await self._publish_all()
                while True:
                    await self._publish_next()
            except WrongStateError:
                behind = self._log.last_sequence + 1 - self._next
                self.counts.skipped_batches += behind
                _log.warning("event batches skipped", extra={"pool": self._name, "batches": behind})

    async def serve_requests(self) -> None:
        """Serves replays and snapshots indefinitely."""
        socket = self._replay_socket
        if socket is None:
            return
        try:
            while True:
                await self._free_requests.acquire()
                frames = await socket.recv_multipart()
                task = asyncio.create_task(self._serve(socket, frames))
                self._requests.add(task)
                task.add_done_callback(self._requests.discard)
                task.add_done_callback(lambda _: self._free_requests.release())
        finally:
            for task in self._requests:
                task.cancel()

    async def _publish_next(self) -> None:
        """Waits for events and publishes them, or publishes a heartbeat if none arrive in time."""
        try:
            async with asyncio.timeout(self._settings.heartbeat_seconds or None):
                await self._log.wait(self._next)
        except TimeoutError:
            await self._send(time.time(), (), self._pool.config)
        while self._is_behind:
            await self._publish_some()
            await asyncio.sleep(0)

    async def _publish_all(self) -> None:
        """Publishes AllBlocksCleared, then all cached blocks, interleaved with the changes made meanwhile.

        A chunk is read when all batches so far have been sent, with no `await` in between.
        """
        self._next = self._log.last_sequence + 1
        await self._send(time.time(), (AllBlocksCleared(),), self._pool.config)
        walk = SnapshotCursor(self._pool)
        while len(self._pool.blocks.prefix_map) and not walk.is_done:
            if self._is_behind:
                await self._publish_some()
                continue
            chunk = walk.next_chunk(CHUNK_BLOCKS)
            if chunk:
                await self._send(time.time(), chunk, self._pool.config)
            await self._turns.next()

    @property
    def _is_behind(self) -> bool:
        return self._next <= self._log.last_sequence

    async def _publish_some(self) -> None:
        """Publishes the next batches of the log.

        Raises:
            WrongStateError: The log no longer keeps them.
        """
        for _ in range(min(_BATCHES_PER_TURN, self._log.last_sequence + 1 - self._next)):
            batch = self._log.kept(self._next)
            await self._send(batch.time_seconds, batch.events, batch.config)
            self._next += 1

    async def _send(self, time_seconds: float, events: Sequence[BlockEvent], config: PoolConfig) -> None:
        payload = self._encoder.encode(time_seconds, events, config)
        if payload is None:
            return
        await self._confirmed()
        self._keep(payload)
        number = self.counts.messages.to_bytes(SEQUENCE_BYTES, "big")
        self.counts.messages += 1
        self._publish_socket.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def _keep(self, payload: bytes) -> None:
        """Keeps a message for replay, and drops the oldest ones beyond the limits of number and bytes."""
        self._kept.append(payload)
        self._kept_bytes += len(payload)
        while len(self._kept) > self._settings.buffer_batches or (
            self._kept_bytes > KEPT_BYTES and len(self._kept) > 1
        ):
            self._kept_bytes -= len(self._kept.popleft())

    async def _serve(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        if len(frames) != _REQUEST_FRAMES or frames[1]:
            _log.debug("event request malformed", extra={"pool": self._name})
            return
        identity, _, request = frames
        peer = _Peer(socket, identity)
        try:
            if request == STATUS_REQUEST:
                await peer.send(STATUS, self._header())
            elif request == SNAPSHOT_REQUEST:
                await self._serve_snapshot(peer)
            elif len(request) == SEQUENCE_BYTES:
                await self._serve_replay(peer, int.from_bytes(request, "big"))
            else:
                _log.debug("event request malformed", extra={"pool": self._name})
        except PeerClosedError:
            _log.debug("event request abandoned", extra={"pool": self._name})

    async def _serve_replay(self, peer: "_Peer", start: int) -> None:
        """Sends the kept batches from `start` to the newest one at the time of the request, then the end marker."""
        has_topic = self._settings.replay_framing is ReplayFraming.TOPIC
        self.counts.replays += 1
        end = self.counts.messages
        at = start
        while at < end:
            at = max(at, self.counts.messages - len(self._kept))
            number, payload = at.to_bytes(SEQUENCE_BYTES, "big"), self._kept[at - self.counts.messages]
            await peer.send(*((self._topic,) if has_topic else ()), number, payload)
            at += 1
        await peer.send(*((b"",) if has_topic else ()), END_OF_REPLAY, b"")

    async def _serve_snapshot(self, peer: "_Peer") -> None:
        """Sends all cached blocks, with the number of the first message to apply after the snapshot."""
        while self._is_behind:  # noqa: ASYNC110 - waits for the publishing task's turns, not for a time
            await asyncio.sleep(0)
        self.counts.snapshots += 1
        walk = SnapshotCursor(self._pool)
        await peer.send(SNAPSHOT_BEGIN, self._header())
        while not walk.is_done:
            chunk = walk.next_chunk(CHUNK_BLOCKS)
            payload = self._encoder.encode(time.time(), chunk, self._pool.config) if chunk else None
            if payload:
                await peer.send(SNAPSHOT_BLOCKS, payload)
            await self._turns.next()
        await peer.send(SNAPSHOT_END, b"")

    def _header(self) -> bytes:
        """Encodes the status: `sequence` is the next message's number, `oldest_sequence` the oldest kept one's."""
        return msgspec.msgpack.encode(
            {
                "pool": self._name,
                "boot_id": self._boot_id,
                "epoch": self._pool.epoch,
                "sequence": self.counts.messages,
                "oldest_sequence": self.counts.messages - len(self._kept),
            }
        )


class _Peer:
    """A peer that sent a request and reads the replies at its own pace."""

    def __init__(self, socket: zmq.asyncio.Socket, identity: bytes) -> None:
        self._socket = socket
        self._identity = identity
        self._num_sent = 0

    async def send(self, *frames: bytes) -> None:
        """Sends a reply when the peer's queue accepts it.

        Raises:
            PeerClosedError: The peer disconnected, or reads nothing.
        """
        due_seconds = time.monotonic() + _STUCK_SECONDS
        while True:
            try:
                await self._socket.send_multipart((self._identity, b"", *frames), zmq.NOBLOCK)
            except zmq.Again:
                if time.monotonic() > due_seconds:
                    raise PeerClosedError from None
                await asyncio.sleep(_PAUSE_SECONDS)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                raise PeerClosedError from None
            else:
                break
        self._num_sent += 1
        if self._num_sent % _REPLIES_PER_TURN == 0:
            await asyncio.sleep(0)
