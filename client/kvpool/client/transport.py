"""What a session needs of the service, and the service in the caller's own process."""

import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from kvpool.server.core.allocator import Allocator, PoolInfo
from kvpool.server.core.config import PoolConfig
from kvpool.server.core.events import BlockEvent
from kvpool.server.core.pool import Pool
from kvpool.server.core.step import Step, StepResult
from kvpool.server.core.types import PoolName, SessionId
from kvpool.server.obs.event_log import EventLog


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session as the service opened it.

    Attributes:
        session_id: Its secret name.
        config: The pool's configuration, none_hash included.
        lease_seconds: How long it outlives its last sign of life.
        epoch: The pool's epoch.
    """

    session_id: str
    config: PoolConfig
    lease_seconds: float
    epoch: int


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The block events of one change of a pool.

    Attributes:
        sequence: The batch's number, from 1, without gaps.
        events: The events, in order.
    """

    sequence: int
    events: tuple[BlockEvent, ...]


class Transport(Protocol):
    """The service, as a synchronous client sees it. Every method raises `KvpoolError`."""

    def create_pool(self, config: PoolConfig) -> PoolInfo:
        """Declares a pool, or finds the one declared alike."""

    def get_pool(self, name: str) -> PoolInfo:
        """Tells what a pool is like now."""

    def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """Waits until a pool is there and ready."""

    def open_session(self, pool: str, client_name: str, lease_seconds: float) -> OpenedSession:
        """Attaches this process to a pool."""

    def apply(self, session_id: str, step: Step) -> StepResult:
        """Sends a step and waits for its result."""

    def mark_executed(self, session_id: str, executed_sequence: int) -> None:
        """Says which steps have run."""

    def close_session(self, session_id: str) -> int:
        """Frees the session's requests and forgets it; returns how many there were."""

    def watch(self, pool: str, from_sequence: int) -> Iterator[EventBatch]:
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

    def open_session(self, pool: str, client_name: str, lease_seconds: float) -> OpenedSession:
        """See `Transport`."""
        with self._lock:
            found, session = self._allocator.open_session(
                pool,
                client_name,
                lease_seconds,
                session_id=SessionId(secrets.token_urlsafe(24)),
                now_seconds=time.monotonic(),
            )
            session.open_streams = 1  # it dies with this process, so no lease is needed
            return OpenedSession(session.session_id, found.config, session.lease_seconds, found.epoch)

    def apply(self, session_id: str, step: Step) -> StepResult:
        """See `Transport`."""
        with self._lock:
            pool, session = self._allocator.session(session_id, time.monotonic())
            result = self._allocator.apply(pool, session, step)
            self._publish(pool)
            return result

    def mark_executed(self, session_id: str, executed_sequence: int) -> None:
        """See `Transport`."""
        with self._lock:
            pool, session = self._allocator.session(session_id, time.monotonic())
            self._allocator.mark_executed(pool, session, executed_sequence)

    def close_session(self, session_id: str) -> int:
        """See `Transport`."""
        with self._lock:
            pool, count = self._allocator.close_session(session_id, time.monotonic())
            self._publish(pool)
            return count

    def watch(self, pool: str, from_sequence: int) -> Iterator[EventBatch]:
        """As `Transport`, but ends when there is nothing more: nothing can come while the caller waits."""
        log = self._logs[self._allocator.pool(pool).config.name]
        sequence = from_sequence or log.last_sequence + 1
        while sequence <= log.last_sequence:
            yield EventBatch(sequence, tuple(log.kept(sequence)))
            sequence += 1

    def close(self) -> None:
        """See `Transport`."""

    def _describe(self, pool: Pool) -> PoolInfo:
        return self._allocator.describe(pool, self._logs[pool.config.name].last_sequence)

    def _publish(self, pool: Pool) -> None:
        self._logs[pool.config.name].append(pool.blocks.take_events())
