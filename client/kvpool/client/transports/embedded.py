"""The service in the caller's own process."""

import secrets
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from math import inf
from typing import Final, TypeVar

from kvpool.client.lease import LeaseTimer
from kvpool.client.primary_connection import closed_error
from kvpool.client.transports.transport import EventBatch, OpenedSession, SessionOptions, WatchKind, WatchOptions
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.quota import Quota
from kvpool.core.commands import (
    ApplyStep,
    AttachStream,
    CloseSession,
    Command,
    CreatePool,
    MarkExecuted,
    OpenSession,
    SetWeightsVersion,
)
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.sessions.session import LeaseBounds, Session
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.state import State
from kvpool.core.steps.columns import Step, StepResult
from kvpool.core.views.event_log import EventLog
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from kvpool.v1.pool_pb2 import PoolInfo
from kvpool.wire.picture import pool_info

EMBEDDED: Final = "embedded:"
"""The address of the core in this process."""

_ResultT = TypeVar("_ResultT")


class EmbeddedTransport:
    """The core in this process: no server and no lease. A lock serializes threads. No method suspends."""

    target = EMBEDDED

    def __init__(self) -> None:
        self._state = State()
        self._logs: dict[PoolName, EventLog] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def check_usable(self) -> None:
        """See `Transport`. A forked process has its own copy of the core."""
        if self._is_closed:
            raise closed_error()

    async def create_pool(self, config: PoolConfig, memory_id: str = "") -> PoolInfo:
        """See `Transport`."""
        with self._lock:
            none_hash = secrets.token_bytes(config.hash_scheme.hash_size_bytes)
            self._execute(CreatePool(config, none_hash, memory_id=memory_id))
            pool = self._state.pools.get(config.name)
            self._logs.setdefault(config.name, EventLog())
            self._publish(pool)
            return self._describe(pool)

    async def get_pool(self, name: str) -> PoolInfo:
        """See `Transport`."""
        self.check_usable()
        with self._lock:
            return self._describe(self._state.pools.get(name))

    async def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """See `Transport`. A pool in this process is ready from the start."""
        del timeout_seconds
        return await self.get_pool(name)

    async def open_session(self, options: SessionOptions) -> OpenedSession:
        """See `Transport`."""
        with self._lock:
            session_id = SessionId(secrets.token_urlsafe(24))
            lease_seconds = LeaseBounds().choose(options.lease_seconds)
            self._execute(
                OpenSession(
                    options.pool_name,
                    session_id,
                    options.client_name,
                    lease_seconds,
                    quota=Quota(options.min_blocks, options.max_blocks),
                    memory_id=options.memory_id,
                    weights_version=options.weights_version,
                    reserve_tokens=options.reserve_tokens,
                )
            )
            self._execute(AttachStream(session_id))  # it ends with this process, so it needs no lease
            pool, session = self._session(session_id)
            self._publish(pool)
            return OpenedSession(
                self,
                _Calls(self, session_id),
                session_id,
                pool.config,
                session.lease_seconds,
                pool.epoch,
                session.session_number,
                LeaseTimer(inf, 0.0),
                session.weights_version,
                session.reserve_tokens,
            )

    async def apply(self, session_id: str, step: Step) -> StepResult:
        """Applies a step of a session."""
        return self.change(session_id, ApplyStep(session_id, step))

    def change(self, session_id: str, command: Command[_ResultT]) -> _ResultT:
        """Executes a command of a session, and publishes its events."""
        with self._lock:
            pool, _ = self._session(session_id)
            result = self._execute(command)
            self._publish(pool)
            return result

    def close_session(self, session_id: str) -> None:
        """Ends a session, unless it was closed before."""
        with self._lock:
            if self._state.sessions.ends.num_freed_by_close(session_id) is None:
                pool, _ = self._session(session_id)
                self._execute(CloseSession(session_id))
                self._publish(pool)

    async def watch(self, options: WatchOptions) -> AsyncGenerator[EventBatch]:
        """See `Transport`. The watch ends with the newest batch: no batch can come while the caller waits."""
        self.check_usable()
        return self._batches(options, self._state.pools.get(options.pool_name))

    async def _batches(self, options: WatchOptions, pool: KVCacheManager) -> AsyncGenerator[EventBatch]:
        log = self._logs[pool.config.name]
        sequence = options.from_sequence or log.last_sequence + 1
        if options.snapshot:
            with self._lock:
                sequence, snapshot = log.last_sequence + 1, self._snapshot(pool, log.last_sequence)
            for batch in snapshot:
                yield batch
                self.check_usable()
        while sequence <= log.last_sequence:
            logged = log.kept(sequence)
            yield EventBatch(sequence, tuple(logged.events), epoch=logged.epoch, time_seconds=logged.time_seconds)
            self.check_usable()
            sequence += 1

    async def close(self) -> None:
        """See `Transport`."""
        self._is_closed = True

    def _execute(self, command: Command[_ResultT]) -> _ResultT:
        self.check_usable()
        return self._state.execute(command, time.monotonic())

    def _session(self, session_id: str) -> tuple[KVCacheManager, Session]:
        return self._state.sessions.find(session_id, time.monotonic())

    def _describe(self, pool: KVCacheManager) -> PoolInfo:
        return pool_info(pool, self._state.pools.state_of(pool), self._logs[pool.config.name].last_sequence)

    def _snapshot(self, pool: KVCacheManager, sequence: int) -> list[EventBatch]:
        walk, now = SnapshotCursor(pool), time.time()
        events = () if walk.is_done else tuple(walk.next_chunk(pool.blocks.num_blocks))
        kinds = ((WatchKind.START, ()), (WatchKind.SNAPSHOT, events), (WatchKind.SNAPSHOT_END, ()))
        return [EventBatch(sequence, part, kind, pool.epoch, time_seconds=now) for kind, part in kinds]

    def _publish(self, pool: KVCacheManager) -> None:
        self._logs[pool.config.name].take_from(pool, time.time())


@dataclass(slots=True)
class _Calls:
    """See `SessionCalls`."""

    transport: EmbeddedTransport
    session_id: str
    _begun: StepResult | KvpoolError | None = None

    async def prepare(self) -> None:
        """See `SessionCalls`."""

    async def exchange(self, step: Step) -> StepResult:
        """See `SessionCalls`."""
        begun, self._begun = self._begun, None
        if isinstance(begun, KvpoolError):
            raise begun
        return begun or await self.transport.apply(self.session_id, step)

    async def begin_exchange(self, step: Step) -> None:
        """See `SessionCalls`."""
        try:
            self._begun = await self.transport.apply(self.session_id, step)
        except KvpoolError as error:
            self._begun = error

    def is_answered(self) -> bool:
        """See `SessionCalls`."""
        return True

    async def mark_executed(self, executed_sequence: int) -> None:
        """See `SessionCalls`."""
        self.transport.change(self.session_id, MarkExecuted(self.session_id, executed_sequence))

    async def set_weights_version(self, weights_version: str) -> None:
        """See `SessionCalls`."""
        self.transport.change(self.session_id, SetWeightsVersion(self.session_id, weights_version))

    async def close(self) -> None:
        """See `SessionCalls`."""
        self.transport.close_session(self.session_id)

    def forget(self) -> None:
        """See `SessionCalls`."""
