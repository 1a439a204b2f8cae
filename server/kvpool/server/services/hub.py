"""What the services of one server share: the core, the clock, the event logs, and who is streaming."""

import asyncio
import contextlib
import gc
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final

from kvpool.core.allocator import Allocator
from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import AbortedError, KvpoolError, UnavailableError, check_range
from kvpool.core.ids import PoolName, SessionId, SessionNumber
from kvpool.core.pause_tolerant_clock import READ_INTERVAL_SECONDS, PauseTolerantClock
from kvpool.core.sessions.quarantine import Quarantined
from kvpool.core.sessions.session import LeaseBounds, Session
from kvpool.core.sessions.session_ends import ended_error
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.views.pool_info import PoolInfo
from kvpool.server.auth.caller import CALLER
from kvpool.server.events.log import EventLogs, LiveEventLog
from kvpool.server.fault_points import NO_FAULTS, FaultPoints
from kvpool.server.limits.config import DEFAULT_LIMITS, Limits
from kvpool.server.limits.fair_turns import FairTurns
from kvpool.server.shutdown import Ending

DRAIN_RETRY_SECONDS: Final = 1.0
_MANY_BLOCKS: Final = 50_000

_log = logging.getLogger("kvpool.server")


class Stream:
    """A long-lived call that can be told to end while it waits for its next message.

    Attributes:
        caller: Whose it is; None where no token is asked for.
        waiting: Whether it waits for its next message.
        ended_by: What it was told to end with.
    """

    def __init__(self, task: "asyncio.Task[object]") -> None:
        self._task = task
        self.caller = CALLER.get()
        self.waiting = False
        self.ended_by: KvpoolError | None = None
        self.driver_id: SessionId | None = None
        """The id that its session was driven by when it began, or had itself given."""

    def end(self, error: KvpoolError) -> None:
        """Makes the call end with `error`: now if it waits, else when it has answered what it is at."""
        self.ended_by = self.ended_by or error
        if self.waiting:
            self._task.cancel()

    def wait(self) -> "_Wait":
        """Marks, by `with`, the wait for the next message; raises what the call was ended by, before or meanwhile."""
        return _Wait(self)


class _Wait:
    """See `Stream.wait`; every step waits so, and a generator would take three times as long."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream.ended_by:
            raise self._stream.ended_by
        self._stream.waiting = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.waiting = False
        if self._stream.ended_by and isinstance(error, asyncio.CancelledError):
            raise self._stream.ended_by from None


class Hub:
    """State of one server. Only its event loop touches it, and no method awaits between a check and a change."""

    def __init__(  # noqa: PLR0913, PLR0917 - a server's settings
        self,
        max_pool_blocks: int,
        new_block_lifetimes: Callable[[], BlockLifetimes | None] = lambda: None,
        leases: LeaseBounds = LeaseBounds(),  # noqa: B008 - frozen
        quarantine_seconds: float = 0.0,
        allocator: Allocator | None = None,
        limits: Limits = DEFAULT_LIMITS,
        faults: FaultPoints = NO_FAULTS,
    ) -> None:
        self.allocator = allocator or Allocator(new_block_lifetimes)
        self.faults = faults
        self._clock = PauseTolerantClock(time.monotonic())
        self._max_pool_blocks = max_pool_blocks
        self._quarantine_seconds = quarantine_seconds
        self._lost_until_seconds = self.now_seconds() + quarantine_seconds
        self._logs = EventLogs()
        self._streams: set[Stream] = set()
        self._by_session: dict[SessionId, Stream] = {}
        self._resuming: dict[SessionId, list[Stream]] = {}
        self.leases = leases
        self.limits = limits
        self.turns = FairTurns(limits.max_waiting_steps)
        self.is_draining = False
        self.ending = Ending(lambda: self.allocator.num_sessions, self.now_seconds)
        self.boot_id = secrets.token_hex(8)
        """Tells this server from one that was started before or after."""
        self.past_epoch = 0
        """Newest epoch that a server before this one may have given, which nobody remembers."""
        self.news = asyncio.Event()
        """Set, and replaced, when a pool becomes ready."""
        self.on_log: Callable[[KVCacheManager, LiveEventLog], None] = lambda _pool, _log: None
        """Called when a pool is there, or is there anew."""
        self.on_log_closed: Callable[[PoolName], None] = lambda _name: None
        """Called when a pool is removed."""
        self.on_session_ended: Callable[[PoolName], None] = lambda _name: None
        """Called when a session of a pool has ended, however."""

    def now_seconds(self) -> float:
        """The time, by the monotonic clock without what this process was stopped or late."""
        return self._clock.read(time.monotonic())

    def session(self, session_id: str) -> tuple[KVCacheManager, Session]:
        """See `Allocator.session`. A session that is told that its lease ran out has ended by then."""
        return self.allocator.session(session_id, self._now_seconds_for(session_id))

    def resume_session(self, session_id: str, sequence: int, resume_key: str) -> tuple[KVCacheManager, Session]:
        """See `Allocator.resume_session`; ends what the process that drove the session before waits for."""
        now_seconds = self._now_seconds_for(session_id)
        pool, session = self.allocator.resume_session(
            session_id, sequence, resume_key=resume_key, now_seconds=now_seconds
        )
        stream = self._by_session.get(session.session_id)
        if stream and stream.driver_id != session.current_id:
            stream.end(_superseded_error())
        for resuming in self._resuming.get(session.session_id, ()):
            if resuming.driver_id != session.current_id:
                resuming.end(ended_error("SESSION_RESUMED"))
        return pool, session

    @contextlib.contextmanager
    def resuming(self, session: Session, stream: Stream) -> Iterator[None]:
        """Keeps a session alive for a call that resumed it and is not answered yet, and ends the call with it."""
        calls = self._resuming.setdefault(session.session_id, [])
        calls.append(stream)
        stream.driver_id = session.current_id
        self.allocator.attach_stream(session)
        try:
            yield
        finally:
            self.allocator.detach_stream(session, self.now_seconds())
            calls.remove(stream)
            if not calls:
                del self._resuming[session.session_id]

    def _now_seconds_for(self, session_id: str) -> float:
        """The time, by which a session whose lease has run out has ended."""
        now_seconds = self.now_seconds()
        if self.allocator.is_overdue(session_id, now_seconds):
            self._expire(now_seconds)
        return now_seconds

    def now_seconds_to_open(self, open_key: str, owner: str) -> float:
        """The time, by which a session that the owner's key opened has ended if its lease has run out.

        What the key does then is told from the sessions alone: a journal knows of no lease that ran out before that.
        """
        return self._now_seconds_for(self.allocator.opened_by(open_key, owner) or "")

    def check_takes_session(self, pool_name: str, owner: str) -> None:
        """Checks that a session more may be opened, by the holder of a token of this name; empty for none.

        Raises:
            UnavailableError: The server is stopping, or about to; or sessions that it lost may run a last step yet.
            NotFoundError: There is no such pool.
            ExhaustedError: There are as many sessions as may be, of the server, the pool or the owner.
        """
        self.refuse_while_draining()
        self.ending.check_not_asked()
        pool = self.allocator.pool(pool_name)
        self._check_lost_steps(pool)
        if owner:
            self.limits.check_token_sessions(owner, self.allocator.num_sessions_of(owner))
        self.limits.check_sessions(self.allocator.num_sessions, len(pool.sessions))

    def _check_lost_steps(self, pool: KVCacheManager) -> None:
        """Lets a quarantine pass from the start on; ranks that fence let no step of before through."""
        left_seconds = self._lost_until_seconds - self.now_seconds()
        if self.allocator.lost_may_run and left_seconds > 0 and not pool.ranks_fence:
            message = f"sessions that the server lost may run a last step for {left_seconds:.1f} s more"
            raise UnavailableError("SESSIONS_LOST", message, field="pool_name", retry_seconds=left_seconds)

    def create_pool(self, config: PoolConfig, owner: str = "") -> tuple[KVCacheManager, bool]:
        """See `Allocator.create_pool`; refuses what would take more memory than the server was given for a pool."""
        check_range("config.num_blocks", config.num_blocks, 0, self._max_pool_blocks)
        epoch = self.newest_past_epoch() + 1
        pool, created = self.allocator.create_pool(config, _new_none_hash(config), epoch, owner=owner)
        if created:
            self._keep_log(pool)
            _log.info(
                "pool created",
                extra={"pool": config.name, "epoch": pool.epoch, "blocks": pool.config.num_blocks},
            )
            self._tell_ready()
        return pool, created

    def newest_past_epoch(self) -> int:
        """Newest epoch that a pool which is not here may have had, of whatever name."""
        return max(self.past_epoch, self.allocator.past_epoch)

    def adopt_pools(self) -> None:
        """Takes note of the pools that a journal brought back."""
        for pool in self.allocator.pools():
            self._keep_log(pool)

    def open_epoch(self, config: PoolConfig, epoch: int, *, ranks_fence: bool, owner: str = "") -> KVCacheManager:
        """See `Allocator.open_epoch`."""
        pool = self.allocator.open_epoch(config, _new_none_hash(config), epoch, ranks_fence=ranks_fence, owner=owner)
        self.faults.reach("epoch.opened")
        self._keep_log(pool)
        self.publish(pool)
        self._tell_ready()
        return pool

    def epoch_of(self, name: str) -> int | None:
        """The epoch of a pool; None if there is none of this name."""
        return self.allocator.pool(name).epoch if self.allocator.has_pool(PoolName(name)) else None

    def note_epoch(self, pool: KVCacheManager) -> None:
        """Takes note that a pool which a scheduler declared began a new epoch: watchers are told that all is gone."""
        _spare_collector(pool)
        self.publish(pool)

    def suspend(self, name: PoolName) -> None:
        """Lets nothing be allocated from a pool for now."""
        self.allocator.suspend(self.allocator.pool(name))

    def resume(self, name: PoolName) -> None:
        """Lets a suspended pool go on."""
        self.allocator.resume(self.allocator.pool(name))
        self._tell_ready()

    def pass_epoch(self, name: PoolName, epoch: int) -> int:
        """See `Allocator.pass_epoch`; ends the sessions' streams. Returns how many sessions there were."""
        pool = self.allocator.pool(name)
        sessions = self.allocator.pass_epoch(pool, epoch)
        self.publish(pool)
        for session in sessions:
            self._end_streams(session.session_id, ended_error("EPOCH_PASSED"))
        return len(sessions)

    def evict_session(self, pool_name: str, number: int) -> Session:
        """See `Allocator.evict_session`; ends the session's stream."""
        pool, session = self.allocator.evict_session(
            pool_name, number, self.now_seconds(), quarantine_seconds=self._quarantine_seconds
        )
        self.publish(pool)
        self._end_streams(session.session_id, ended_error("SESSION_EVICTED"))
        self._tell_ended(pool, session)
        return session

    def end_quarantine(self, name: PoolName, numbers: Sequence[SessionNumber]) -> None:
        """See `Allocator.end_quarantine`."""
        pool = self.allocator.pool(name)
        for quarantined in self.allocator.end_quarantine(name, numbers):
            self._tell_released(pool, quarantined)

    def remove_pool(self, name: str) -> None:
        """See `Allocator.remove_pool`; ends the watches of its events."""
        self.allocator.remove_pool(name)
        self.on_log_closed(PoolName(name))
        self._logs.close(PoolName(name), AbortedError("POOL_REMOVED", f"pool {name!r} was removed"))

    def takes_sessions(self, name: PoolName) -> bool:
        """Whether a pool takes new sessions, as far as it is not for its ranks to say."""
        return self.allocator.drain_state.accepts_sessions(name) and not self.ending.is_asked and not self.is_draining

    def open_drain_state(self, name: PoolName | None) -> None:
        """See `Allocator.undrain`; without a name a stop is taken back, too. Those who wait for a pool are told."""
        self.allocator.undrain(name)
        if name is None:
            self.ending.take_back()
        self._tell_ready()

    def describe(self, name: str) -> PoolInfo:
        """Tells what a pool is like now.

        Raises:
            NotFoundError: There is none of this name.
        """
        pool = self.allocator.pool(name)
        return self.allocator.describe(pool, self.event_log(pool).last_sequence)

    def event_log(self, pool: KVCacheManager) -> LiveEventLog:
        """The pool's events."""
        return self._logs[pool.config.name]

    def publish(self, pool: KVCacheManager) -> None:
        """Logs the events of the change just made."""
        self._logs[pool.config.name].publish(pool)

    def refuse_while_draining(self) -> None:
        """Raises UnavailableError if the server is stopping."""
        if self.is_draining:
            raise _draining_error()

    @contextlib.contextmanager
    def streaming(self) -> Iterator[Stream]:
        """Registers the current task's call, so that draining ends it."""
        self.refuse_while_draining()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("outside a task")
        stream = Stream(task)
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    def streams(self) -> tuple[Stream, ...]:
        """The long-lived calls that are open now."""
        return tuple(self._streams)

    @contextlib.contextmanager
    def attached(self, session: Session, stream: Stream) -> Iterator[None]:
        """Makes a stream the one that keeps a session alive; an older one is ended."""
        older = self._by_session.get(session.session_id)
        if older:
            older.end(_superseded_error())
        self._by_session[session.session_id] = stream
        stream.driver_id = session.current_id
        self.allocator.attach_stream(session)
        try:
            yield
        finally:
            self.allocator.detach_stream(session, self.now_seconds())
            if self._by_session.get(session.session_id) is stream:
                del self._by_session[session.session_id]

    def close_session(self, session_id: str) -> tuple[int, tuple[KVCacheManager, Session] | None]:
        """See `Allocator.close_session`; ends the session's stream.

        Returns:
            How many requests were freed, and the pool and the session; None if it was closed before.
        """
        now_seconds = self._now_seconds_for(session_id)
        count = self.allocator.closed_count(session_id)
        if count is not None:
            return count, None
        pool, session = self.allocator.session(session_id, now_seconds)
        _, count = self.allocator.close_session(session_id, now_seconds)
        self.publish(pool)
        self._end_streams(session.session_id, ended_error("SESSION_CLOSED"))
        self.on_session_ended(pool.config.name)
        return count, (pool, session)

    def _end_streams(self, session_id: SessionId, error: KvpoolError) -> None:
        stream = self._by_session.get(session_id)
        for each in (*((stream,) if stream else ()), *self._resuming.get(session_id, ())):
            each.end(error)

    async def expire_leases(self) -> None:
        """Ends sessions as their leases run out, and their quarantine, for ever."""
        while True:
            left = self.allocator.next_expiry_seconds() - self.now_seconds()
            await asyncio.sleep(min(max(left, 0.001), READ_INTERVAL_SECONDS))
            self.expire_now()

    def expire_now(self) -> None:
        """Ends the sessions whose lease has run out, and the quarantine of those whose time is up."""
        now_seconds = self.now_seconds()
        if self.allocator.lost_may_run and now_seconds >= self._lost_until_seconds:
            self.allocator.end_lost_steps()
        self._expire(now_seconds)
        for pool, quarantined in self.allocator.end_due_quarantines(now_seconds):
            self._tell_released(pool, quarantined)

    def _expire(self, now_seconds: float) -> None:
        for pool, session, count in self.allocator.expire(now_seconds, quarantine_seconds=self._quarantine_seconds):
            self.publish(pool)
            _log.warning("lease expired", extra={**session_fields(pool, session), "requests": count})
            self._tell_ended(pool, session)
            self.faults.reach("lease.expired")

    def drain(self) -> None:
        """Refuses new work from now on, and ends open streams once they have answered what they are at.

        This is the server stopping. What an operator drains is `Allocator.drain_state`.
        """
        self.is_draining = True
        for stream in self.streams():
            stream.end(_draining_error())

    def _tell_ended(self, pool: KVCacheManager, session: Session) -> None:
        """Says that blocks of a session that was ended are in quarantine, if they are."""
        if pool.quarantine.find(session.session_number):
            _log.info(
                "session quarantined", extra={**session_fields(pool, session), "blocks": pool.quarantine.num_blocks}
            )
        self.on_session_ended(pool.config.name)

    def _tell_released(self, pool: KVCacheManager, quarantined: Quarantined) -> None:
        extra = {
            **session_fields(pool, quarantined.session),
            "seconds": round(self.now_seconds() - quarantined.since_seconds, 3),
            "blocks": pool.quarantine.num_blocks,
        }
        _log.info("quarantine released", extra=extra)

    def _keep_log(self, pool: KVCacheManager) -> None:
        """Keeps the events of a pool that is there, or is there anew."""
        _spare_collector(pool)
        self.on_log(pool, self._logs.open(pool.config.name))

    def _tell_ready(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


def _spare_collector(pool: KVCacheManager) -> None:
    """Keeps the garbage collector from the columns of a large pool.

    To walk those of a million blocks stops all for 35 ms, 70 with events, and finds nothing: they hold ints and bytes.
    """
    if pool.blocks.num_blocks >= _MANY_BLOCKS:
        gc.collect()
        gc.freeze()


def session_fields(pool: KVCacheManager, session: Session) -> dict[str, object]:
    """What the log says of a session; its id is a secret."""
    return {
        "pool": pool.config.name,
        "session": session.session_number,
        "client": session.client_name,
        "epoch": pool.epoch,
    }


def _new_none_hash(config: PoolConfig) -> bytes:
    return secrets.token_bytes(min(config.hash_scheme.hash_size_bytes, 64))


def _superseded_error() -> AbortedError:
    return AbortedError("STREAM_SUPERSEDED", "another stream of this session, or another process, took over")


def _draining_error() -> UnavailableError:
    return UnavailableError("DRAINING", "the server is stopping", retry_seconds=DRAIN_RETRY_SECONDS)
