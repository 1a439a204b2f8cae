"""Executes the commands of a server, and their effects outside of it: the only writer of its state.

A recovery and a standby, which do not serve yet, execute records in its place: see `execute_record`.

1. A command is executed, then recorded. Its effects come after that.
2. The effects of a command are in one table, `EFFECTS`. They depend on the command and its result, change no state, and
   do not fail: they publish the events of the change, end calls, schedule fences, wake waiting calls, and log.
   With callbacks that parts register, a reader could not find the effects of a command.
3. A step has no effects: the service that applies it publishes its events, and saves a look-up on the step path.
4. After a bug nothing continues with half a change: the process ends, and the next one recovers the state before the
   command from the journal. Without a journal, the pool that the command may have changed begins a new epoch.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

from kvpool.core import commands
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import Command, EndReason, SessionEnd
from kvpool.core.errors import AbortedError, KvpoolError
from kvpool.core.ids import PoolName
from kvpool.core.pools.sessions import end_of
from kvpool.core.state import State
from kvpool.server.crash import crash
from kvpool.server.events.log import EventLogs
from kvpool.server.services.calls import Calls
from kvpool.server.services.clock import ServerClock
from kvpool.server.services.fencing import Fencing

_ResultT = TypeVar("_ResultT")
_log = logging.getLogger("kvpool.server")


class CommandRecorder(Protocol):
    """The journal of a server."""

    @property
    def error(self) -> str:
        """Why the journal is down; empty while it is up."""

    def record(self, command: Command[Any], now_seconds: float, result: object) -> None:
        """Records a command that was executed, before its result is sent."""

    def crash_after_bug(self, method: str) -> None:
        """Ends the process after a command that failed halfway, unless a restart would not recover the state."""


class ChangeFailedError(RuntimeError):
    """A bug ended a change halfway, and `Executor.recover` has dropped what it left: a caller may continue.

    No KvpoolError and no MemoryError, which are refusals that changed nothing.
    """


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
        end_epoch: Ends the epoch of a pool whose state cannot be trusted; see `Ranks.end_epoch`.
    """

    end_epoch: Callable[[PoolName], None]

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
        self._is_recovering = False

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
        except Exception as error:
            raise self.recover(type(command).__name__, lambda: self._changed_pools(command)) from error
        if self._journal and command.recorded:
            try:
                self._journal.record(command, now_seconds, result)
            except Exception as error:
                raise self.recover(type(command).__name__, lambda: self._changed_pools(command)) from error
        effect = self.EFFECTS.get(type(command))
        if effect:
            effect(self, command, result)
        return result

    def recover(self, method: str, changed_pools: Callable[[], Sequence[PoolName]]) -> ChangeFailedError:
        """Drops what a change that failed halfway may have left, before anything else reads it.

        Args:
            method: What failed, for the log.
            changed_pools: Returns the pools that it may have changed. With a journal, nothing reads the state again.

        Returns:
            The error to raise.
        """
        if self._journal:
            self._journal.crash_after_bug(method)
        if self._is_recovering:
            self._crash(method)
        _log.critical("bug: a change failed halfway, the epoch ends", exc_info=True, extra={"method": method})
        self._is_recovering = True
        try:
            for name in changed_pools():
                self.end_epoch(name)
        except Exception:  # noqa: BLE001 - such as too little memory; the process ends
            self._crash(method)
        self._is_recovering = False
        return ChangeFailedError("a change failed halfway")

    @staticmethod
    def _crash(method: str) -> NoReturn:
        _log.critical("bug: a change failed halfway, the server exits", extra={"method": method}, exc_info=True)
        crash()

    def _changed_pools(self, command: Command[Any]) -> list[PoolName]:
        """The existing pools that a command may have changed: that of its session, or the one that it names, or all."""
        found = self.state.sessions.get(getattr(command, "session_id", ""))
        name = found[0].config.name if found else getattr(command, "pool_name", None)
        name = command.config.name if isinstance(command, commands.CreatePool | commands.OpenEpoch) else name
        return [pool.config.name for pool in self.state.pools if name in (None, pool.config.name)]

    def open_log(self, pool: KVCacheManager) -> None:
        """Opens the event log of a pool that was created, restored, or has a new epoch."""
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
        fields = session_fields(end_of(pool, session))
        self._event_logs.publish(pool)  # of a new epoch, or of evicted blocks of an earlier weights version
        if opened.starts_epoch:
            _log.warning("epoch started in new memory", extra={**fields, "memory": command.memory_id})
        _log.info("session opened", extra={**fields, "seconds": session.lease_seconds})

    def _weights_version_set(self, command: commands.SetWeightsVersion, is_new: bool) -> None:  # noqa: FBT001 - the result
        if is_new:
            pool, session = self.state.sessions[command.session_id]
            self._event_logs.publish(pool)
            fields = session_fields(end_of(pool, session))
            _log.info("weights version set", extra={**fields, "weights_version": session.weights_version})

    def _blocks_changed(self, command: commands.FreePart | commands.MarkExecuted, _: int | None) -> None:
        self._event_logs.publish(self.state.sessions[command.session_id][0])

    def _session_closed(self, _: commands.CloseSession, closed: commands.SessionClosed) -> None:
        if closed.end:
            self._ended(closed.end, "SESSION_CLOSED")
            _log.info("session closed", extra={**session_fields(closed.end), "requests": closed.num_freed_requests})

    def _session_ended(self, command: commands.EndSession, end: SessionEnd) -> None:
        extra = {**session_fields(end), "requests": end.num_requests}
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
            _log.info("session quarantined", extra={**session_fields(end), "blocks": pool.quarantine.num_blocks})

    def _quarantine_ended(self, command: commands.EndQuarantine, ends: tuple[commands.QuarantineEnd, ...]) -> None:
        num_blocks = self.state.pools.get(command.pool_name).quarantine.num_blocks
        for end in ends:
            extra = {**session_fields(end.session), "seconds": round(end.seconds, 3), "blocks": num_blocks}
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
        commands.SetWeightsVersion: _weights_version_set,
        **dict.fromkeys((commands.FreePart, commands.MarkExecuted), _blocks_changed),  # also by copies in host memory
        commands.CloseSession: _session_closed,
        commands.EndSession: _session_ended,
        commands.EndQuarantine: _quarantine_ended,
    }
    """The effects of each command that has any, outside the state."""


def session_fields(end: SessionEnd) -> dict[str, object]:
    """Log fields of a session that has ended, or of `end_of` an open one. Its id is a secret and is not logged."""
    return {"pool": end.pool_name, "session": end.session_number, "client": end.client_name, "epoch": end.epoch}
