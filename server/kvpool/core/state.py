"""The state of a server: its pools and sessions. Every change is a command that `State.execute` executes.

1. A session id is never reused. Ended sessions and unknown sessions are refused with different errors.
2. Everything else that this class offers only reads.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from kvpool.core import commands
from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import HANDLERS, Command, QuarantineEnd, SessionEnd, SessionOpened, handles
from kvpool.core.errors import InvalidArgumentError, NotFoundError, check_range
from kvpool.core.execution import apply, end_session
from kvpool.core.ids import PoolName, SessionId, SessionNumber
from kvpool.core.pools.memory_identity import check_memory_id, needs_new_epoch
from kvpool.core.pools.registry import PoolRegistry
from kvpool.core.sessions.session import Session, check_key, original_id
from kvpool.core.sessions.session_ends import SessionEnds, ended_error
from kvpool.core.steps.columns import StepResult

_ResultT = TypeVar("_ResultT")


class State(PoolRegistry):
    """Pools by name and sessions by id.

    Args:
        new_block_lifetimes: Creates the sampler of block lifetimes for a new pool; may return None.

    Attributes:
        lost_may_run: Whether a last step of sessions whose state was lost may still run.
    """

    def __init__(self, new_block_lifetimes: Callable[[], BlockLifetimes | None] = lambda: None) -> None:
        super().__init__(new_block_lifetimes)
        self.lost_may_run = False
        self._sessions: dict[SessionId, tuple[KVCacheManager, Session]] = {}
        self._by_open_key: dict[tuple[str, str], Session] = {}
        self._ends = SessionEnds()
        self._last_number = 0

    def __repr__(self) -> str:
        return f"<State: {len(self._pools)} pools, {len(self._sessions)} sessions>"

    def execute(self, command: Command[_ResultT], now_seconds: float) -> _ResultT:
        """Executes a command: checks first, then changes.

        Args:
            command: The command; its class documents the result and the errors.
            now_seconds: The current time, on the clock of the leases.

        Raises:
            KvpoolError: The command is refused; nothing was changed.
        """
        result: _ResultT = HANDLERS[type(command)](self, command, now_seconds)
        return result

    # Queries

    def session(self, session_id: str, now_seconds: float) -> tuple[KVCacheManager, Session]:
        """Finds a session for its client. Does not renew the lease.

        Raises:
            NotFoundError: No session ever had this id.
            AbortedError: The session was closed, its lease expired, the epoch ended, an operator ended it, another
                process resumed it, or its server lost its journal.
        """
        found = self._live_session(session_id, now_seconds)
        if found[1].current_id != session_id:
            raise ended_error("SESSION_RESUMED")
        return found

    def find_session(self, pool_name: str, number: int) -> tuple[KVCacheManager, Session]:
        """Finds a session by its number. O(sessions).

        Raises:
            NotFoundError: The pool does not exist, or has no session of this number.
        """
        pool = self.pool(pool_name)
        session = next((session for session in self.sessions_of(pool) if session.session_number == number), None)
        if session is None:
            message = f"pool {pool_name!r} has no session {number}"
            raise NotFoundError("SESSION_NOT_FOUND", message, field="session_number")
        return pool, session

    def opened_by(self, open_key: str, owner: str = "") -> SessionId | None:
        """The id of the open session that this owner opened with this key; None if there is none."""
        session = self._by_open_key.get((owner, open_key))
        return session.session_id if session else None

    def owner(self, session_id: str) -> tuple[PoolName, str] | None:
        """The pool and the owner of an open session; None if there is none."""
        found = self._sessions.get(original_id(session_id))
        return (found[0].config.name, found[1].owner) if found else None

    def is_overdue(self, session_id: str, now_seconds: float) -> bool:
        """Whether the lease of a session has expired, so that `due_commands` ends it."""
        found = self._sessions.get(original_id(session_id))
        return found is not None and found[1].expires_seconds <= now_seconds

    def closed_count(self, session_id: str) -> int | None:
        """Number of requests freed when a session was closed; None if it was not closed or is no longer remembered."""
        return self._ends.num_freed_by_close(session_id)

    def due_leases(self, now_seconds: float) -> list[SessionId]:
        """The open sessions whose lease has expired, by the ids that they were opened with."""
        return [sid for sid, (_, session) in self._sessions.items() if session.expires_seconds <= now_seconds]

    def due_quarantines(self, now_seconds: float) -> list[tuple[PoolName, tuple[SessionNumber, ...]]]:
        """The ended sessions whose quarantine has passed, by pool."""
        due = ((pool.config.name, tuple(pool.quarantine.due(now_seconds))) for pool in self._pools.values())
        return [(name, numbers) for name, numbers in due if numbers]

    def next_expiry_seconds(self) -> float:
        """When the next lease or quarantine expires, in seconds; infinity if none does."""
        leases = (session.expires_seconds for _, session in self._sessions.values())
        quarantines = (pool.quarantine.next_due_seconds for pool in self._pools.values())
        return min(chain(leases, quarantines), default=float("inf"))

    @property
    def last_session_number(self) -> SessionNumber:
        """The newest session number in any pool; 0 before the first session."""
        return SessionNumber(self._last_number)

    @property
    def num_sessions(self) -> int:
        """Number of open sessions in all pools."""
        return len(self._sessions)

    def num_sessions_of(self, owner: str) -> int:
        """Number of open sessions of an owner in all pools. O(sessions)."""
        return [session.owner for _, session in self._sessions.values()].count(owner)

    def sessions(self) -> Iterator[tuple[KVCacheManager, Session]]:
        """All open sessions with their pools, ordered by session number."""
        return iter(self._sessions.values())

    # Commands

    @handles(commands.PassEpoch)
    def _pass_epoch(self, command: commands.PassEpoch, _: float) -> tuple[SessionEnd, ...]:
        pool = self.pool(command.pool_name)
        ends = tuple(_end_of(pool, session) for session in self.sessions_of(pool))
        for end in ends:
            self._end(end.session_id, "EPOCH_PASSED")
        pool.activity.epoch_ends += len(ends)
        pool.is_suspended = True
        pool.begin_epoch(pool.config, command.epoch)
        return ends

    @handles(commands.OpenSession)
    def _open_session(self, command: commands.OpenSession, now_seconds: float) -> SessionOpened:
        if len(command.client_name.encode("utf-8", "surrogatepass")) > 256:  # noqa: PLR2004 - the proto states it
            raise InvalidArgumentError("client_name", "longer than 256 bytes")
        check_key("open_key", command.open_key)
        found = self._opened_before(command, now_seconds)
        if found:
            return SessionOpened(found, is_new=False)
        pool = self.pool(command.pool_name)
        check_memory_id(command.memory_id, has_ranks=pool.config.name in self.rank_groups)
        self.drain_state.check(pool.config.name)
        pool.check_serving()
        starts_epoch = needs_new_epoch(pool, command.memory_id)
        pool.quotas.check(command.quota)  # nothing is refused after this
        if starts_epoch:
            pool.begin_epoch(pool.config, pool.epoch + 1)
        pool.memory_id = command.memory_id
        self._last_number += 1
        session = Session(
            command.session_id,
            SessionNumber(self._last_number),
            command.client_name,
            command.lease_seconds,
            now_seconds,
            command.open_key,
            _open_arguments(command),
            pool.quotas.open(command.quota),
            owner=command.owner,
            salt=command.salt,
        )
        self._sessions[session.session_id] = (pool, session)
        if command.open_key:
            self._by_open_key[command.owner, command.open_key] = session
        pool.sessions[session.session_id] = session
        pool.activity.sessions_opened += 1
        return SessionOpened(session.session_id, is_new=True, starts_epoch=starts_epoch)

    def _opened_before(self, command: commands.OpenSession, now_seconds: float) -> SessionId | None:
        session = self._by_open_key.get((command.owner, command.open_key))
        if session is None or session.expires_seconds <= now_seconds:
            return None
        if session.open_arguments != _open_arguments(command):
            message = "already opened a session with other arguments"
            raise InvalidArgumentError("open_key", message, reason="OPEN_KEY_REUSED")
        if session.current_id != session.session_id:
            raise ended_error("SESSION_RESUMED")
        self._sessions[session.session_id][0].activity.retries += 1
        session.last_seen_seconds = now_seconds
        return session.session_id

    @handles(commands.ResumeSession)
    def _resume_session(self, command: commands.ResumeSession, now_seconds: float) -> SessionId:
        pool, session = self._live_session(command.session_id, now_seconds)
        check_range("sequence", command.sequence, 0, session.sequence)
        check_key("resume_key", command.resume_key)
        is_newest = session.is_newest_resumption(command.resume_key)
        if is_newest is False:
            raise ended_error("SESSION_RESUMED")
        if is_newest:
            pool.activity.retries += 1
        else:
            self._last_number += 1
            session.resume(command.resume_key, SessionNumber(self._last_number))
            pool.renumber_session(session.previous_number, session.session_number)
            key = session.session_id
            self._sessions[key] = self._sessions.pop(key)  # to the end, as both are ordered by number
            pool.sessions[key] = pool.sessions.pop(key)
        session.last_seen_seconds = now_seconds
        return session.current_id

    @handles(commands.KeepAlive)
    def _keep_alive(self, command: commands.KeepAlive, now_seconds: float) -> None:
        self.session(command.session_id, now_seconds)[1].last_seen_seconds = now_seconds

    @handles(commands.AttachStream)
    def _attach_stream(self, command: commands.AttachStream, _: float) -> None:
        self._sessions[command.session_id][1].open_streams += 1

    @handles(commands.DetachStream)
    def _detach_stream(self, command: commands.DetachStream, now_seconds: float) -> None:
        found = self._sessions.get(command.session_id)
        if found:
            found[1].open_streams -= 1
            found[1].last_seen_seconds = now_seconds

    @handles(commands.ApplyStep)
    def _apply_step(self, command: commands.ApplyStep, now_seconds: float) -> StepResult:
        pool, session = self.session(command.session_id, now_seconds)
        session.last_seen_seconds = now_seconds
        return apply.apply_step(pool, session, command.step, command.source)

    @handles(commands.CountRetry)
    def _count_retry(self, command: commands.CountRetry, now_seconds: float) -> None:
        pool, session = self.session(command.session_id, now_seconds)
        session.last_seen_seconds = now_seconds
        pool.activity.retries += 1

    @handles(commands.MarkExecuted)
    def _mark_executed(self, command: commands.MarkExecuted, now_seconds: float) -> None:
        pool, session = self.session(command.session_id, now_seconds)
        session.last_seen_seconds = now_seconds
        session.check_executed(command.executed_sequence, session.sequence)
        apply.mark_executed(pool, session, command.executed_sequence)

    @handles(commands.CloseSession)
    def _close_session(self, command: commands.CloseSession, now_seconds: float) -> int:
        count = self.closed_count(command.session_id)
        if count is not None:
            return count
        pool, session = self.session(command.session_id, now_seconds)
        self._end(session.session_id, "SESSION_CLOSED", len(session.requests))
        pool.activity.sessions_closed += 1
        return end_session.end_session(pool, session)

    @handles(commands.EvictSession)
    def _evict_session(self, command: commands.EvictSession, now_seconds: float) -> SessionEnd:
        pool, session = self.find_session(command.pool_name, command.session_number)
        pool.activity.evicted_sessions += 1
        return self._quarantine(session.session_id, "SESSION_EVICTED", now_seconds, command.quarantine_seconds)

    @handles(commands.ExpireSession)
    def _expire_session(self, command: commands.ExpireSession, now_seconds: float) -> SessionEnd:
        self._sessions[command.session_id][0].activity.leases_expired += 1
        return self._quarantine(command.session_id, "LEASE_EXPIRED", now_seconds, command.quarantine_seconds)

    def _quarantine(
        self, session_id: SessionId, reason: str, now_seconds: float, quarantine_seconds: float
    ) -> SessionEnd:
        pool, session = self._end(session_id, reason)
        end = _end_of(pool, session)
        end_session.quarantine_session(pool, session, now_seconds, quarantine_seconds)
        return replace(end, is_quarantined=pool.quarantine.find(session.session_number) is not None)

    @handles(commands.EndQuarantine)
    def _end_quarantine(self, command: commands.EndQuarantine, _: float) -> tuple[QuarantineEnd, ...]:
        pool = self.pool(command.pool_name)
        found = [each for each in map(pool.quarantine.find, command.session_numbers) if each]
        ends = tuple(QuarantineEnd(_end_of(pool, each.session), each.since_seconds) for each in found)
        for each in found:
            end_session.end_quarantine(pool, each)
        return ends

    @handles(commands.LoseSessions)
    def _lose_sessions(self, _: commands.LoseSessions, __: float) -> None:
        self._ends.mark_incomplete()
        self.lost_may_run = True

    @handles(commands.EndLostSteps)
    def _end_lost_steps(self, _: commands.EndLostSteps, __: float) -> None:
        self.lost_may_run = False

    @handles(commands.RenewLeases)
    def _renew_leases(self, _: commands.RenewLeases, now_seconds: float) -> None:
        for _pool, session in self._sessions.values():
            session.open_streams = 0
            session.last_seen_seconds = now_seconds
        for pool in self._pools.values():
            pool.quarantine.restart_waits(now_seconds)

    def _end(self, session_id: SessionId, reason: str, num_freed_requests: int = 0) -> tuple[KVCacheManager, Session]:
        pool, session = self._sessions.pop(session_id)
        self._ends.remember(session.current_id, reason, num_freed_requests)
        key = (session.owner, session.open_key)
        if self._by_open_key.get(key) is session:  # otherwise the key opened another session after this one expired
            del self._by_open_key[key]
        del pool.sessions[session_id]
        return pool, session

    def _live_session(self, session_id: str, now_seconds: float) -> tuple[KVCacheManager, Session]:
        found = self._sessions.get(original_id(session_id))
        if found is None:
            raise self._ends.error(session_id)
        if found[1].expires_seconds <= now_seconds:  # `ExpireSession` will free its blocks and report it
            raise ended_error("LEASE_EXPIRED")
        return found


def _open_arguments(command: commands.OpenSession) -> tuple[object, ...]:
    return command.pool_name, command.client_name, command.memory_id, *command.requested


def _end_of(pool: KVCacheManager, session: Session) -> SessionEnd:
    return SessionEnd(
        pool.config.name,
        pool.epoch,
        session.session_id,
        session.session_number,
        session.client_name,
        len(session.requests),
    )
