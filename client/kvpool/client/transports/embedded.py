"""What a session needs of the service, and the service in the caller's own process."""

import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final, Protocol

from kvpool.client.lease import LeaseTimer
from kvpool.core.allocator import Allocator
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.events import BlockEvent
from kvpool.core.ids import PoolName, SessionId, SessionNumber
from kvpool.core.sessions.session import LeaseBounds, Session
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Step, StepResult
from kvpool.core.views.event_log import EventLog
from kvpool.core.views.pool_info import PoolInfo
from kvpool.core.views.snapshot_cursor import SnapshotCursor


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request as the service knows it, of a session that was resumed.

    Attributes:
        request_id: Its id.
        number: Its number in steps; 0 if steps cannot name it.
        num_tokens: Tokens known of it, prompt and output.
        num_computed_tokens: Tokens that have room, hits included.
        block_ids: Its blocks, group by group; block 0 where nothing is looked at any more.
        lora_name: Its LoRA, if the service was told.
        last_block_hash: Hash of its last full hash block; empty if it has none.
    """

    request_id: str
    number: int
    num_tokens: int
    num_computed_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    lora_name: str
    last_block_hash: bytes


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session as the service opened or resumed it.

    Attributes:
        session_id: Its secret name.
        config: The pool's configuration, none_hash included.
        lease_seconds: How long it outlives its last sign of life.
        epoch: The pool's epoch.
        session_number: Its number on the server, never used again; no secret.
        lease_timer: How long its lease is sure to last; renewed by the transport.
        sequence: Number of its last change.
        held: The requests that it has, if it was resumed.
    """

    session_id: str
    config: PoolConfig
    lease_seconds: float
    epoch: int
    session_number: SessionNumber
    lease_timer: LeaseTimer
    sequence: int = 0
    held: tuple[HeldRequest, ...] = ()


class WatchKind(Enum):
    """What a watch tells."""

    START = "start"
    """All that is cached will be told anew, from nothing."""
    BATCH = "batch"
    """The events of one change of the pool."""
    SNAPSHOT = "snapshot"
    """Part of what is cached."""
    SNAPSHOT_END = "snapshot_end"
    """What was told since the start is the pool's map after batch `sequence`."""
    HEARTBEAT = "heartbeat"
    """Nothing happened since batch `sequence`."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """A message of a watch: the block events of one change of a pool, unless `kind` says otherwise.

    Attributes:
        sequence: The batch's number, from 1, without gaps; in other kinds, that of the newest batch before.
        events: The events, in order.
        kind: What this is.
        epoch: The pool's epoch.
        boot_id: Tells the server from one that was started before or after, whose numbers are others.
        time_seconds: When it happened, in seconds since 1970 by the server's clock.
    """

    sequence: int
    events: tuple[BlockEvent, ...] = ()
    kind: WatchKind = WatchKind.BATCH
    epoch: int = 0
    boot_id: str = ""
    time_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What to watch.

    Attributes:
        pool: The pool's name.
        from_sequence: First batch wanted; 0 for the next one to come, or with a snapshot.
        snapshot: Whether to begin with all that is cached, and to go on for ever, over lost connections and restarts.
        heartbeat_seconds: After how long without another message a heartbeat is to come; 0 for never.
    """

    pool: str
    from_sequence: int = 0
    snapshot: bool = False
    heartbeat_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.snapshot and self.from_sequence:
            raise InvalidArgumentError("from_sequence", "a watch that begins with a snapshot begins with nothing else")


DEFAULT_HEARTBEAT_SECONDS: Final = 5.0


def watch_options(pool: str, from_sequence: int, heartbeat_seconds: float | None, *, snapshot: bool) -> WatchOptions:
    """Makes options; heartbeats that are left open come with a snapshot only."""
    if heartbeat_seconds is None:
        heartbeat_seconds = DEFAULT_HEARTBEAT_SECONDS if snapshot else 0.0
    return WatchOptions(pool, from_sequence, snapshot, heartbeat_seconds)


class Transport(Protocol):
    """The service, as a synchronous client sees it. Every method raises `KvpoolError`."""

    def create_pool(self, config: PoolConfig) -> PoolInfo:
        """Declares a pool, or finds the one declared alike."""

    def get_pool(self, name: str) -> PoolInfo:
        """Tells what a pool is like now."""

    def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """Waits until a pool is there and ready."""

    def open_session(
        self, pool: str, client_name: str, lease_seconds: float, quota: Quota, memory_id: str = ""
    ) -> OpenedSession:
        """Attaches this process to a pool."""

    def resume_session(self, session_id: str, sequence: int) -> OpenedSession:
        """Takes a session over from the process that drove it."""

    def apply(self, session_id: str, step: Step) -> StepResult:
        """Sends a step and waits for its result."""

    def send(self, session_id: str, step: Step) -> None:
        """Sends a step ahead of `apply`, which must follow with it, waits for its result, and tells what went wrong."""

    def mark_executed(self, session_id: str, executed_sequence: int) -> None:
        """Says which steps have run."""

    def close_session(self, session_id: str) -> int:
        """Frees the session's requests and forgets it; returns how many there were."""

    def watch(self, options: WatchOptions) -> Iterator[EventBatch]:
        """Yields batches of block events."""

    def close(self) -> None:
        """Ends all connections."""


class EmbeddedTransport:
    """The core in this process: no server, no lease; threads take turns."""

    def __init__(self) -> None:
        self._allocator = Allocator()
        self._logs: dict[PoolName, EventLog] = {}
        self._lock = threading.Lock()

    def create_pool(self, config: PoolConfig) -> PoolInfo:
        """See `Transport`."""
        with self._lock:
            none_hash = secrets.token_bytes(config.hash_scheme.hash_size_bytes)
            pool, created = self._allocator.create_pool(config, none_hash)
            if created:
                self._logs[config.name] = EventLog()
            return self._describe(pool)

    def get_pool(self, name: str) -> PoolInfo:
        """See `Transport`."""
        with self._lock:
            return self._describe(self._allocator.pool(name))

    def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """As `get_pool`: a pool in this process is ready from the start."""
        del timeout_seconds
        return self.get_pool(name)

    def open_session(
        self, pool: str, client_name: str, lease_seconds: float, quota: Quota, memory_id: str = ""
    ) -> OpenedSession:
        """See `Transport`."""
        with self._lock:
            found, session = self._allocator.open_session(
                pool,
                client_name,
                LeaseBounds().choose(lease_seconds),
                session_id=SessionId(secrets.token_urlsafe(24)),
                now_seconds=time.monotonic(),
                quota=quota,
                memory_id=memory_id,
            )
            self._publish(found)
            self._allocator.attach_stream(session)  # it dies with this process, so no lease is needed
            return _opened(found, session)

    def resume_session(self, session_id: str, sequence: int) -> OpenedSession:
        """See `Transport`; for another part of this process."""
        with self._lock:
            now_seconds = time.monotonic()
            return _opened(
                *self._allocator.resume_session(session_id, sequence, resume_key="", now_seconds=now_seconds)
            )

    def apply(self, session_id: str, step: Step) -> StepResult:
        """See `Transport`."""
        with self._lock:
            pool, session = self._allocator.session(session_id, time.monotonic())
            result = self._allocator.apply(pool, session, step)
            self._publish(pool)
            return result

    def send(self, session_id: str, step: Step) -> None:
        """See `Transport`. There is nobody who could work meanwhile."""

    def mark_executed(self, session_id: str, executed_sequence: int) -> None:
        """See `Transport`."""
        with self._lock:
            pool, session = self._allocator.session(session_id, time.monotonic())
            self._allocator.mark_executed(pool, session, executed_sequence)

    def close_session(self, session_id: str) -> int:
        """See `Transport`."""
        with self._lock:
            count = self._allocator.closed_count(session_id)
            if count is None:
                pool, count = self._allocator.close_session(session_id, time.monotonic())
                self._publish(pool)
            return count

    def watch(self, options: WatchOptions) -> Iterator[EventBatch]:
        """As `Transport`, but ends when there is nothing more: nothing can come while the caller waits."""
        pool = self._allocator.pool(options.pool)
        log = self._logs[pool.config.name]
        sequence = options.from_sequence or log.last_sequence + 1
        if options.snapshot:
            with self._lock:
                sequence, snapshot = log.last_sequence + 1, self._snapshot(pool, log.last_sequence)
            yield from snapshot
        while sequence <= log.last_sequence:
            batch = log.kept(sequence)
            yield EventBatch(sequence, tuple(batch.events), epoch=batch.epoch, time_seconds=batch.time_seconds)
            sequence += 1

    def close(self) -> None:
        """See `Transport`."""

    def _describe(self, pool: KVCacheManager) -> PoolInfo:
        return self._allocator.describe(pool, self._logs[pool.config.name].last_sequence)

    def _snapshot(self, pool: KVCacheManager, sequence: int) -> list[EventBatch]:
        walk, now = SnapshotCursor(pool), time.time()
        events = () if walk.is_done else tuple(walk.next_chunk(pool.blocks.num_blocks))
        kinds = ((WatchKind.START, ()), (WatchKind.SNAPSHOT, events), (WatchKind.SNAPSHOT_END, ()))
        return [EventBatch(sequence, told, kind, pool.epoch, time_seconds=now) for kind, told in kinds]

    def _publish(self, pool: KVCacheManager) -> None:
        self._logs[pool.config.name].take_from(pool, time.time())


def _opened(pool: KVCacheManager, session: Session) -> OpenedSession:
    held = (
        HeldRequest(
            request.request_id,
            max(request.number, 0),
            request.num_tokens,
            request.num_computed_tokens,
            tuple(tuple(table.block_ids) for table in request.tables),
            request.lora_name or "",
            request.hashes[-1] if request.hashes else b"",
        )
        for request in session.requests.values()
    )
    return OpenedSession(
        session.current_id,
        pool.config,
        session.lease_seconds,
        pool.epoch,
        session.session_number,
        LeaseTimer(inf, 0.0),
        session.sequence,
        tuple(held),
    )
