"""State that the services of one server share: the core, the clock, the event logs, and the open calls."""

import asyncio
import contextlib
import gc
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import (
    AttachStream,
    CloseSession,
    Command,
    CreatePool,
    DetachStream,
    EndLostSteps,
    EndQuarantine,
    EvictSession,
    ExpireSession,
    OpenEpoch,
    OpenSession,
    PassEpoch,
    RemovePool,
    ResumePool,
    ResumeSession,
    SessionEnd,
    Undrain,
)
from kvpool.core.errors import AbortedError, KvpoolError, UnavailableError, check_range
from kvpool.core.ids import PoolName, SessionId, SessionNumber
from kvpool.core.pause_tolerant_clock import MAX_RUN_SECONDS, PauseTolerantClock
from kvpool.core.sessions.session import LeaseBounds, Session
from kvpool.core.sessions.session_ends import ended_error
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.state import State
from kvpool.core.views.pool_info import PoolInfo
from kvpool.server.auth.caller import CALLER
from kvpool.server.events.log import EventLogs, LiveEventLog
from kvpool.server.fault_points import NO_FAULTS, FaultPoints
from kvpool.server.limits.config import DEFAULT_LIMITS, Limits
from kvpool.server.limits.fair_turns import FairTurns
from kvpool.server.shutdown import Shutdown

DRAIN_RETRY_SECONDS: Final = 1.0
_MIN_WAIT_SECONDS: Final = 0.001
_LATE_SECONDS: Final = 0.1
"""Lateness of a wake-up from which the server first handles arrived messages, and the time that it takes for that."""
_MANY_BLOCKS: Final = 50_000
"""Size from which the columns of a pool are excluded from garbage collection."""

_ResultT = TypeVar("_ResultT")

_log = logging.getLogger("kvpool.server")


class CommandRecorder(Protocol):
    """The journal of a server, as the hub sees it."""

    def record(self, command: Command[Any], now_seconds: float, result: object) -> None:
        """Records a command that was executed, before its result is sent."""

    def give_up_after_bug(self) -> None:
        """Notes that a command failed halfway, so that the records no longer match the state."""


class OpenCall:
    """A long-lived call, in the current task, that the server can end while it waits for its next message or the pool.

    Attributes:
        caller: The holder of the call's token; None without tokens.
        waiting: Whether the call waits.
        ended_by: The error that it was ended with; None if it was not.
        session_id: The session id with which it was attached to its session, or which its resumption returned.
        is_stream: Whether the call is the stream of its session. Other calls of a session wait for its resumption.
    """

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.caller = CALLER.get()
        self.waiting = False
        self.ended_by: KvpoolError | None = None
        self.session_id: SessionId | None = None
        self.is_stream = False

    def end(self, error: KvpoolError) -> None:
        """Ends the call with `error`: now if it waits, otherwise once it has answered its current message."""
        if self.ended_by:
            return
        self.ended_by = error
        if self.waiting and self._task:
            self._task.cancel()

    def wait(self) -> "_Wait":
        """Returns a context manager around a wait. It raises the error that the call was ended with."""
        return _Wait(self)


class _Wait:
    """See `OpenCall.wait`. Every step uses it, and a generator would take three times as long."""

    __slots__ = ("_call",)

    def __init__(self, call: OpenCall) -> None:
        self._call = call

    def __enter__(self) -> None:
        if self._call.ended_by:
            raise self._call.ended_by
        self._call.waiting = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.waiting = False
        if self._call.ended_by and isinstance(error, asyncio.CancelledError):
            raise self._call.ended_by from None


class Hub:
    """State of one server. Only its event loop uses it, and no method awaits between a check and a change.

    Args:
        max_pool_blocks: Maximum number of blocks of one pool.
        new_block_lifetimes: Makes the sampler of block lifetimes of a new pool; None for none.
        leases: Bounds of the sessions' leases.
        quarantine_seconds: Time until the blocks of a session that was ended are free, in pools without fences.
        state: Pools and sessions recovered from a journal; None to start with none.
        journal: Records the commands; None for none.
        limits: Limits on clients.

    Attributes:
        state: All pools and sessions. Changed by `execute` only.
        leases: See above.
        limits: See above.
        turns: Order in which sessions change pools.
        is_stopping: Whether the server has started to stop.
        shutdown: When the server stops.
        boot_id: Random id of this server process.
        past_epoch: Newest epoch that an earlier server without a journal may have used.
        pool_ready: Event that is set, and replaced by a new one, when a pool becomes ready.
        on_log: Called with the event log of a pool that was created or recreated.
        on_log_closed: Called when a pool is removed.
        on_session_ended: Called when a session of a pool has ended, for any reason.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - a server's settings
        self,
        max_pool_blocks: int,
        new_block_lifetimes: Callable[[], BlockLifetimes | None] = lambda: None,
        leases: LeaseBounds = LeaseBounds(),  # noqa: B008 - frozen
        quarantine_seconds: float = 0.0,
        state: State | None = None,
        journal: CommandRecorder | None = None,
        limits: Limits = DEFAULT_LIMITS,
        faults: FaultPoints = NO_FAULTS,
    ) -> None:
        self.state = state or State(new_block_lifetimes)
        self._journal = journal
        self.faults = faults
        self._clock = PauseTolerantClock(time.monotonic())
        self._max_pool_blocks = max_pool_blocks
        self._quarantine_seconds = quarantine_seconds
        self._lost_steps_end_seconds = self.now_seconds() + quarantine_seconds
        self._logs = EventLogs()
        self._calls: set[OpenCall] = set()
        self._calls_by_session: dict[SessionId, list[OpenCall]] = {}
        self.leases = leases
        self.limits = limits
        self.turns = FairTurns(limits.max_waiting_steps)
        self.is_stopping = False
        self.shutdown = Shutdown(lambda: self.state.num_sessions)
        self.boot_id = secrets.token_hex(8)
        self.past_epoch = 0
        self.pool_ready = asyncio.Event()
        self.on_log: Callable[[KVCacheManager, LiveEventLog], None] = lambda _pool, _log: None
        self.on_log_closed: Callable[[PoolName], None] = lambda _name: None
        self.on_session_ended: Callable[[PoolName], None] = lambda _name: None

    def now_seconds(self) -> float:
        """Monotonic time in seconds, without the time during which this process was paused."""
        return self._clock.read(time.monotonic())

    def execute(self, command: Command[_ResultT]) -> _ResultT:
        """Executes a command now, and records it. See `State.execute`."""
        now_seconds = self.now_seconds()
        try:
            result = self.state.execute(command, now_seconds)
            if self._journal and command.recorded:
                self._journal.record(command, now_seconds, result)
        except KvpoolError:
            raise
        except BaseException:
            if self._journal:
                self._journal.give_up_after_bug()
            raise
        return result

    async def sleep_until(self, due_seconds: float) -> None:
        """Lets the clock run, and waits until a time, for at most half of MAX_RUN_SECONDS.

        Only one task calls this, and calls it again at once. After a late wake-up it waits a little longer: messages
        that have arrived are handled before their senders can be late. After a pause the clock stands still meanwhile.
        """
        start_seconds = time.monotonic()
        self._clock.start(start_seconds)
        wait_seconds = min(max(due_seconds - self.now_seconds(), _MIN_WAIT_SECONDS), MAX_RUN_SECONDS / 2)
        await asyncio.sleep(wait_seconds)
        woken_seconds = time.monotonic()
        if woken_seconds - start_seconds > wait_seconds + _LATE_SECONDS:
            if woken_seconds - start_seconds < MAX_RUN_SECONDS:
                self._clock.start(woken_seconds)
            await asyncio.sleep(_LATE_SECONDS)

    def session(self, session_id: str) -> tuple[KVCacheManager, Session]:
        """See `State.session`. Ends the leases that have run out first, if that of this session is among them."""
        return self.state.session(session_id, self._now_seconds_for(session_id))

    def resume_session(self, session_id: str, sequence: int, resume_key: str) -> tuple[KVCacheManager, Session]:
        """See `ResumeSession`. Ends the open calls of the process that used the session before."""
        self._now_seconds_for(session_id)
        current_id = self.execute(ResumeSession(session_id, sequence, resume_key))
        pool, session = self.state.session(current_id, self.now_seconds())
        for call in self._calls_by_session.get(session.session_id, ()):
            if call.session_id != session.current_id:
                call.end(_superseded_error() if call.is_stream else ended_error("SESSION_RESUMED"))
        return pool, session

    @contextlib.contextmanager
    def resuming(self, session: Session, call: OpenCall) -> Iterator[None]:
        """Keeps a session alive while a call of it is open, such as one that resumed it and waits for the ranks.

        The end of the session, or a later resumption, ends the call.
        """
        calls = self._calls_by_session.setdefault(session.session_id, [])
        calls.append(call)
        call.session_id = session.current_id
        self.execute(AttachStream(session.session_id))
        try:
            yield
        finally:
            self.execute(DetachStream(session.session_id))
            calls.remove(call)
            if not calls:
                del self._calls_by_session[session.session_id]

    @contextlib.contextmanager
    def attached(self, session: Session, stream: OpenCall) -> Iterator[None]:
        """Keeps a session alive while its stream is open. Ends an older stream of the session."""
        for call in self._calls_by_session.get(session.session_id, ()):
            if call.is_stream:
                call.end(_superseded_error())
        stream.is_stream = True
        with self.resuming(session, stream):
            yield

    def _now_seconds_for(self, session_id: str) -> float:
        """Returns the time, after ending sessions whose lease has run out if this one is among them."""
        now_seconds = self.now_seconds()
        if self.state.is_overdue(session_id, now_seconds):
            self._expire_leases(now_seconds)
        return now_seconds

    def opened_by(self, open_key: str, owner: str) -> SessionId | None:
        """See `State.opened_by`. Ends that session first if its lease has run out.

        The effect of a key then depends on the open sessions alone, as it does when the journal is replayed.
        """
        self._now_seconds_for(self.state.opened_by(open_key, owner) or "")
        return self.state.opened_by(open_key, owner)

    def open_session(self, command: OpenSession) -> tuple[KVCacheManager, Session, bool]:
        """See `OpenSession`. Call `opened_by` first.

        Returns:
            The pool, the session, and whether it is new.
        """
        opened = self.execute(command)
        pool, session = self.state.session(opened.session_id, self.now_seconds())
        if opened.starts_epoch:
            _freeze_columns(pool)
            self.publish(pool)
            extra = {**session_fields(pool, session), "memory": command.memory_id}
            _log.warning("epoch started in new memory", extra=extra)
        return pool, session, opened.is_new

    def check_takes_session(self, pool_name: str, owner: str) -> None:
        """Checks that a further session may be opened.

        Args:
            pool_name: Name of the pool.
            owner: Name of the caller's token; empty without tokens.

        Raises:
            UnavailableError: The server is stopping or about to stop, or lost sessions may still run a last step.
            NotFoundError: The pool does not exist.
            ExhaustedError: The server, the pool or the owner has the maximum number of sessions.
        """
        self.check_not_stopping()
        self.shutdown.check_not_requested()
        pool = self.state.pool(pool_name)
        self._check_lost_steps(pool)
        if owner:
            self.limits.check_token_sessions(owner, self.state.num_sessions_of(owner))
        self.limits.check_sessions(self.state.num_sessions, len(pool.sessions))

    def _check_lost_steps(self, pool: KVCacheManager) -> None:
        """Refuses sessions until a quarantine after the start is over, unless the ranks fence off earlier steps."""
        left_seconds = self._lost_steps_end_seconds - self.now_seconds()
        if self.state.lost_may_run and left_seconds > 0 and not pool.ranks_fence:
            message = f"sessions that the server lost may still run a last step, for {left_seconds:.1f} s"
            raise UnavailableError("SESSIONS_LOST", message, field="pool_name", retry_seconds=left_seconds)

    def create_pool(self, config: PoolConfig, owner: str = "") -> tuple[KVCacheManager, bool]:
        """See `CreatePool`. Refuses a pool with more than `max_pool_blocks` blocks."""
        check_range("config.num_blocks", config.num_blocks, 0, self._max_pool_blocks)
        epoch = self.newest_past_epoch() + 1
        created = self.execute(CreatePool(config, _new_none_hash(config), epoch, owner))
        pool = self.state.pool(config.name)
        if created:
            self._open_log(pool)
            _log.info(
                "pool created",
                extra={"pool": config.name, "epoch": pool.epoch, "blocks": pool.config.num_blocks},
            )
            self._notify_ready()
        return pool, created

    def newest_past_epoch(self) -> int:
        """Newest epoch that a pool which no longer exists may have had, of any name."""
        return max(self.past_epoch, self.state.past_epoch)

    def restore_pools(self) -> None:
        """Opens the event logs of the pools that a journal restored."""
        for pool in self.state.pools():
            self._open_log(pool)

    def open_epoch(self, config: PoolConfig, epoch: int, *, ranks_fence: bool, owner: str = "") -> None:
        """See `OpenEpoch`."""
        self.execute(OpenEpoch(config, _new_none_hash(config), epoch, ranks_fence, owner))
        self.faults.reach("epoch.opened")
        pool = self.state.pool(config.name)
        self._open_log(pool)
        self.publish(pool)
        self._notify_ready()

    def resume(self, name: PoolName) -> None:
        """Resumes allocation from a suspended pool."""
        self.execute(ResumePool(name))
        self._notify_ready()

    def pass_epoch(self, name: PoolName, epoch: int) -> int:
        """See `PassEpoch`. Ends the sessions' open calls. Returns the number of sessions."""
        ends = self.execute(PassEpoch(name, epoch))
        self.publish(self.state.pool(name))
        for end in ends:
            self._end_calls(end.session_id, ended_error("EPOCH_PASSED"))
        return len(ends)

    def evict_session(self, pool_name: str, number: int) -> None:
        """See `EvictSession`. Ends the session's open calls."""
        end = self.execute(EvictSession(pool_name, number, self._quarantine_seconds))
        self._end_calls(end.session_id, ended_error("SESSION_EVICTED"))
        self._session_ended(end)

    def end_quarantine(self, name: PoolName, numbers: Sequence[SessionNumber]) -> None:
        """See `EndQuarantine`."""
        for end in self.execute(EndQuarantine(name, tuple(numbers))):
            extra = {
                **ended_fields(end.session),
                "seconds": round(self.now_seconds() - end.since_seconds, 3),
                "blocks": self.state.pool(name).quarantine.num_blocks,
            }
            _log.info("quarantine ended", extra=extra)

    def remove_pool(self, name: str) -> None:
        """See `RemovePool`. Ends the watches of its events."""
        self.execute(RemovePool(name))
        self.on_log_closed(PoolName(name))
        self._logs.close(PoolName(name), AbortedError("POOL_REMOVED", f"pool {name!r} was removed"))

    def takes_sessions(self, name: PoolName) -> bool:
        """Whether a pool takes new sessions, regardless of the state of its ranks."""
        return self.state.drain_state.accepts_sessions(name) and not self.is_about_to_stop

    @property
    def is_about_to_stop(self) -> bool:
        """Whether the server is stopping, or a stop was requested."""
        return self.is_stopping or self.shutdown.is_requested

    def undrain(self, name: PoolName | None) -> None:
        """See `Undrain`. Without a name also cancels a requested stop. Wakes calls that wait for a pool."""
        self.execute(Undrain(name))
        if name is None:
            self.shutdown.cancel()
        self._notify_ready()

    def describe(self, name: str) -> PoolInfo:
        """Describes a pool as it is now.

        Raises:
            NotFoundError: The pool does not exist.
        """
        pool = self.state.pool(name)
        return self.state.describe(pool, self.event_log(pool).last_sequence)

    def event_log(self, pool: KVCacheManager) -> LiveEventLog:
        """The event log of a pool."""
        return self._logs[pool.config.name]

    def publish(self, pool: KVCacheManager) -> None:
        """Adds the events of the last change to the event log of a pool."""
        self._logs[pool.config.name].publish(pool)

    def check_not_stopping(self) -> None:
        """Raises UnavailableError if the server is stopping."""
        if self.is_stopping:
            raise _stopping_error()

    @contextlib.contextmanager
    def open_call(self) -> Iterator[OpenCall]:
        """Registers the current task's call, so that a stop of the server ends it."""
        self.check_not_stopping()
        call = OpenCall()
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)

    def open_calls(self) -> tuple[OpenCall, ...]:
        """The long-lived calls that are open now."""
        return tuple(self._calls)

    def close_session(self, session_id: str) -> int:
        """See `CloseSession`. Ends the session's open calls."""
        now_seconds = self._now_seconds_for(session_id)
        if self.state.closed_count(session_id) is not None:
            return self.execute(CloseSession(session_id))
        pool, session = self.state.session(session_id, now_seconds)
        count = self.execute(CloseSession(session_id))
        self.publish(pool)
        self._end_calls(session.session_id, ended_error("SESSION_CLOSED"))
        self.on_session_ended(pool.config.name)
        _log.info("session closed", extra={**session_fields(pool, session), "requests": count})
        return count

    def _end_calls(self, session_id: SessionId, error: KvpoolError) -> None:
        for call in self._calls_by_session.get(session_id, ()):
            call.end(error)

    def expire_now(self) -> None:
        """Ends the sessions whose lease has run out, and the quarantines that are over."""
        now_seconds = self.now_seconds()
        if self.state.lost_may_run and now_seconds >= self._lost_steps_end_seconds:
            self.execute(EndLostSteps())
        self._expire_leases(now_seconds)
        for name, numbers in self.state.due_quarantines(now_seconds):
            self.end_quarantine(name, numbers)

    def _expire_leases(self, now_seconds: float) -> None:
        for session_id in self.state.due_leases(now_seconds):
            end = self.execute(ExpireSession(session_id, self._quarantine_seconds))
            _log.warning("lease expired", extra={**ended_fields(end), "requests": end.num_requests})
            self._session_ended(end)
            self.faults.reach("lease.expired")

    def stop(self) -> None:
        """Refuses new work, and ends each open call once it has answered its current message.

        An operator's drain of pools is a different state: `State.drain_state`.
        """
        self.is_stopping = True
        for call in self.open_calls():
            call.end(_stopping_error())

    def _session_ended(self, end: SessionEnd) -> None:
        """Publishes and reports that a session has ended. Logs it if its blocks are in quarantine."""
        pool = self.state.pool(end.pool_name)
        self.publish(pool)
        if end.is_quarantined:
            extra = {**ended_fields(end), "blocks": pool.quarantine.num_blocks}
            _log.info("session quarantined", extra=extra)
        self.on_session_ended(end.pool_name)

    def _open_log(self, pool: KVCacheManager) -> None:
        """Opens the event log of a pool that was created or has a new epoch."""
        _freeze_columns(pool)
        self.on_log(pool, self._logs.open(pool.config.name))

    def _notify_ready(self) -> None:
        self.pool_ready.set()
        self.pool_ready = asyncio.Event()


def _freeze_columns(pool: KVCacheManager) -> None:
    """Excludes the columns of a large pool from garbage collection.

    Traversing the columns of a million blocks stops the process for 35 ms, or 70 ms with events, and finds nothing,
    because they hold ints and bytes.
    """
    if pool.blocks.num_blocks >= _MANY_BLOCKS:
        gc.collect()
        gc.freeze()


def session_fields(pool: KVCacheManager, session: Session) -> dict[str, object]:
    """Log fields of a session. Its id is a secret and is not logged."""
    return {
        "pool": pool.config.name,
        "session": session.session_number,
        "client": session.client_name,
        "epoch": pool.epoch,
    }


def ended_fields(end: SessionEnd) -> dict[str, object]:
    """Log fields of a session that has ended."""
    return {"pool": end.pool_name, "session": end.session_number, "client": end.client_name, "epoch": end.epoch}


def _new_none_hash(config: PoolConfig) -> bytes:
    return secrets.token_bytes(min(config.hash_scheme.hash_size_bytes, 64))


def _superseded_error() -> AbortedError:
    return AbortedError("STREAM_SUPERSEDED", "another stream of this session, or another process, took over")


def _stopping_error() -> UnavailableError:
    return UnavailableError("DRAINING", "the server is stopping", retry_seconds=DRAIN_RETRY_SECONDS)
