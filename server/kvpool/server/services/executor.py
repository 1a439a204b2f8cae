"""Executes the commands of a server, and their effects outside of it: the only writer of its state.

A recovery and a standby, which do not serve yet, execute records in its place: see `execute_record`.

1. A command is executed, then recorded. Its effects come after that.
2. The effects of a command are in one table, `EFFECTS`. They depend on the command and its result, change no state, and
   do not fail: they publish the events of the change, end calls, schedule fences, wake waiting calls, and log.
   With callbacks that parts register, a reader could not find the effects of a command.
3. A step has no effects: the service that applies it publishes its events, and saves a look-up on the step path.
"""

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import Any, ClassVar, Final, Protocol, TypeVar

from kvpool.core import commands
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import Command, EndReason, SessionEnd
from kvpool.core.errors import AbortedError, KvpoolError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.sessions.session import Session
from kvpool.core.state import State
from kvpool.server.events.log import EventLogs
from kvpool.server.services.calls import Calls
from kvpool.server.services.clock import ServerClock
from kvpool.server.services.fencing import Fencing

_ResultT = TypeVar("_ResultT")
_MANY_BLOCKS: Final = 50_000
"""Size from which the columns of a pool are excluded from garbage collection."""
_log = logging.getLogger("kvpool.server")


class CommandRecorder(Protocol):
    """The journal of a server."""

    @property
    def error(self) -> str:
        """Why the journal is down; empty while it is up."""

    def record(self, command: Command[Any], now_seconds: float, result: object) -> None:
        """Records a command that was executed, before its result is sent."""

    def give_up_after_bug(self) -> None:
        """Records that a command failed halfway, so that the records no longer match the state."""


class Executor:
    """The executor of one server, in its event loop. No caller awaits between a check and a change.

    Args:
        state: All pools and sessions. Others only read it.
        clock: The server's clock.
        journal: Records the commands; None for none.
        event_logs: The event logs of the pools.
        calls: The open calls.

    Attributes:
        fencing: Fences that are due.
        pool_ready: Wakes its waiters when a pool may have become ready. It is never set for longer.
    """

    def __init__(
        self, state: State, clock: ServerClock, journal: CommandRecorder | None, event_logs: EventLogs, calls: Calls
    ) -> None:
        self.state = state
        self.clock = clock
        self.fencing = Fencing()
        self.pool_ready = asyncio.Event()
        self._journal = journal
        self._event_logs = event_logs
        self._calls = calls

    def execute(self, command: Command[_ResultT], now_seconds: float | None = None) -> _ResultT:
        """Executes a command, records it, and carries out its effects. See `State.execute`.

        Args:
            command: The command.
            now_seconds: The time of a decision that the command depends on; None for now.
        """
        if now_seconds is None:
            now_seconds = self.clock.now_seconds()
        try:
            result = self.state.execute(command, now_seconds)
        except KvpoolError:
            raise
        except MemoryError as error:  # other errors of memory change nothing, and are refusals
            self._give_up_journal()
            raise RuntimeError("a change failed halfway") from error
        except BaseException:
            self._give_up_journal()
            raise
        if self._journal and command.recorded:
            try:
                self._journal.record(command, now_seconds, result)
            except BaseException:
                self._give_up_journal()
                raise
        effect = self.EFFECTS.get(type(command))
        if effect:
            effect(self, command, result)
        return result

    def _give_up_journal(self) -> None:
        if self._journal:
            self._journal.give_up_after_bug()

    def open_log(self, pool: KVCacheManager) -> None:
        """Opens the event log of a pool that was created, restored, or has a new epoch."""
        _freeze_columns(pool)
        self._event_logs.open(pool)
        if error := pool.config.rare_hits:
            _log.warning("prefixes hit rarely", extra={"pool": pool.config.name, "error": error})

    def _pool_created(self, command: commands.CreatePool, is_new: bool) -> None:  # noqa: FBT001 - the result
        if is_new:
            pool = self.state.pools.get(command.config.name)
            is_replaced = pool.config.name in self._event_logs
            self.open_log(pool)
            self._event_logs.publish(pool)
            extra = {"pool": pool.config.name, "epoch": pool.epoch, "blocks": pool.config.num_blocks}
            if is_replaced:
                _log.warning("pool replaced", extra={**extra, "memory": command.memory_id})
            else:
                _log.info("pool created", extra=extra)
            self._wake_waiters()

    def _epoch_opened(self, command: commands.OpenEpoch, _: None) -> None:
        pool = self.state.pools.get(command.config.name)
        self.open_log(pool)
        self._event_logs.publish(pool)
        self._wake_waiters()

    def _epoch_passed(self, command: commands.PassEpoch, ends: tuple[SessionEnd, ...]) -> None:
        self._event_logs.publish(self.state.pools.get(command.pool_name))
        for end in ends:
            self._calls.end(end.session_id, "EPOCH_PASSED")

    def _pool_removed(self, command: commands.RemovePool, _: None) -> None:
        error = AbortedError("POOL_REMOVED", f"pool {command.pool_name!r} was removed")
        self._event_logs.close(PoolName(command.pool_name), error)

    def _cache_reset(self, command: commands.ResetPrefixCache, _: bool) -> None:  # noqa: FBT001 - the result
        self._event_logs.publish(self.state.pools.get(command.pool_name))

    def _session_opened(self, command: commands.OpenSession, opened: commands.SessionOpened) -> None:
        if not opened.is_new:
            return
        pool, session = self.state.sessions[opened.session_id]
        fields = session_fields(pool, session)
        self._event_logs.publish(pool)  # of a new epoch, or of evicted blocks of an earlier weights version
        if opened.starts_epoch:
            _freeze_columns(pool)
            _log.warning("epoch started in new memory", extra={**fields, "memory": command.memory_id})
        _log.info("session opened", extra={**fields, "seconds": session.lease_seconds})

    def _session_resumed(self, _: commands.ResumeSession, current_id: SessionId) -> None:
        pool, session = self.state.sessions[current_id]
        self._calls.supersede(session)
        extra = {"session_before": session.former_numbers[-1], "requests": len(session.requests)}
        _log.info("session resumed", extra={**session_fields(pool, session), **extra})

    def _weights_version_set(self, command: commands.SetWeightsVersion, is_new: bool) -> None:  # noqa: FBT001 - the result
        if is_new:
            pool, session = self.state.sessions[command.session_id]
            self._event_logs.publish(pool)
            fields = session_fields(pool, session)
            _log.info("weights version set", extra={**fields, "weights_version": session.weights_version})

    def _part_freed(self, command: commands.FreePart, _: int) -> None:
        self._event_logs.publish(self.state.sessions[command.session_id][0])

    def _session_closed(self, _: commands.CloseSession, closed: commands.SessionClosed) -> None:
        if closed.end:
            self._ended(closed.end, "SESSION_CLOSED")
            _log.info("session closed", extra={**ended_fields(closed.end), "requests": closed.num_freed_requests})

    def _session_ended(self, command: commands.EndSession, end: SessionEnd) -> None:
        extra = {**ended_fields(end), "requests": end.num_requests}
        if command.reason is EndReason.LEASE_EXPIRED:
            _log.warning("lease expired", extra=extra)
        elif command.reason is EndReason.PROCESS_GONE:  # the service of operators logs what they end
            _log.warning("session ended, process gone", extra=extra)
        self._ended(end, command.reason.name)

    def _ended(self, end: SessionEnd, reason: str) -> None:
        pool = self.state.pools.get(end.pool_name)
        self._event_logs.publish(pool)
        self._calls.end(end.session_id, reason)
        self.fencing.schedule(end.pool_name)
        if end.is_quarantined:
            _log.info("session quarantined", extra={**ended_fields(end), "blocks": pool.quarantine.num_blocks})

    def _quarantine_ended(self, command: commands.EndQuarantine, ends: tuple[commands.QuarantineEnd, ...]) -> None:
        num_blocks = self.state.pools.get(command.pool_name).quarantine.num_blocks
        for end in ends:
            extra = {**ended_fields(end.session), "seconds": round(end.seconds, 3), "blocks": num_blocks}
            _log.info("quarantine ended", extra=extra)

    def _wake_waiters(self, *_: object) -> None:
        self.pool_ready.set()
        self.pool_ready.clear()

    EFFECTS: ClassVar[dict[type[Command[Any]], Callable[..., None]]] = {
        commands.CreatePool: _pool_created,
        commands.OpenEpoch: _epoch_opened,
        commands.PassEpoch: _epoch_passed,
        commands.RemovePool: _pool_removed,
        commands.ResumePool: _wake_waiters,
        commands.Undrain: _wake_waiters,
        commands.ResetPrefixCache: _cache_reset,
        commands.OpenSession: _session_opened,
        commands.ResumeSession: _session_resumed,
        commands.SetWeightsVersion: _weights_version_set,
        commands.FreePart: _part_freed,
        commands.CloseSession: _session_closed,
        commands.EndSession: _session_ended,
        commands.EndQuarantine: _quarantine_ended,
    }
    """The effects of each command that has any, outside the state."""


def _freeze_columns(pool: KVCacheManager) -> None:
    """Excludes the columns of a large pool from garbage collection.

    Traversing the columns of a million blocks stops the process for 35 ms, or 70 ms with events, and finds nothing,
    because they hold ints and bytes. This does not collect first: that stops the process as long. The server does when
    it starts.
    """
    if pool.blocks.num_blocks >= _MANY_BLOCKS:
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
