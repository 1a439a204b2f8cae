"""The sessions and pools of a server; every change of the server's state is a method call on `Allocator`.

1. A session id is never reused. Ended sessions and unknown sessions are refused with different errors.
2. Time, ids, random bytes and values from the server's settings are arguments. The same calls in the same order give
   the same results, also under other settings.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.quota import NO_QUOTA, Quota
from kvpool.core.errors import InvalidArgumentError, NotFoundError, check_range
from kvpool.core.execution import apply
from kvpool.core.ids import PoolName, SessionId, SessionNumber
from kvpool.core.pools.memory_identity import check_memory_id, needs_new_epoch
from kvpool.core.pools.registry import PoolRegistry
from kvpool.core.sessions.quarantine import Quarantined
from kvpool.core.sessions.session import Session, check_key, original_id
from kvpool.core.sessions.session_ends import SessionEnds, ended_error
from kvpool.core.steps.columns import Step, StepResult


class Allocator(PoolRegistry):
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
        return f"<Allocator: {len(self._pools)} pools, {len(self._sessions)} sessions>"

    def pass_epoch(self, pool: KVCacheManager, epoch: int) -> list[Session]:
        """Ends all sessions of a pool that lost a rank, and clears its blocks; the pool stays suspended.

        Returns:
            The sessions that were open.
        """
        sessions = self.sessions_of(pool)
        for session in sessions:
            self._end(session.session_id, "EPOCH_PASSED")
        pool.activity.epoch_ends += len(sessions)
        pool.is_suspended = True
        pool.begin_epoch(pool.config, epoch)
        return sessions

    def open_session(  # noqa: PLR0913 - the fields of the request
        self,
        pool_name: str,
        client_name: str,
        lease_seconds: float,
        *,
        session_id: SessionId,
        now_seconds: float,
        open_key: str = "",
        requested: tuple[float, ...] = (),
        quota: Quota = NO_QUOTA,
        owner: str = "",
        salt: bytes = b"",
        memory_id: str = "",
    ) -> tuple[KVCacheManager, Session]:
        """Opens a session in a pool, or finds the open session that the same key opened.

        If the pool's blocks are in another, unused memory, the pool first starts a new epoch. O(num_blocks).

        Args:
            pool_name: The pool.
            client_name: Name that the client gives itself.
            lease_seconds: The lease, as chosen by `LeaseBounds.choose`.
            session_id: Id for a new session.
            now_seconds: The current time.
            open_key: Random key of the caller, so that it can retry the call; empty to always open a new session.
            requested: The requested values from which lease and quota were chosen. With a known key they are compared,
                as are the pool, the client's name and the memory; lease and quota are then ignored.
            quota: Guaranteed and maximum number of blocks.
            owner: Name of the token that owns the session; empty for none.
            salt: Separates the session's hashes from others; empty for the hashes of the pool.
            memory_id: The memory that holds the engine's tensors, see `memory_identity`; empty if not given.

        Returns:
            The pool and the session. The id of a found session differs from `session_id`. The call renews the lease.

        Raises:
            InvalidArgumentError: The client's name, the key, the memory or the quota is out of range, or the key was
                used with other arguments.
            AbortedError: The session that the key opened was resumed by another process.
            NotFoundError: The pool does not exist.
            UnavailableError: The pool is drained or suspended, or another memory is in use.
            ExhaustedError: The quota's minimum cannot be guaranteed now.
        """
        if len(client_name.encode("utf-8", "surrogatepass")) > 256:  # noqa: PLR2004 - the proto states it
            raise InvalidArgumentError("client_name", "longer than 256 bytes")
        check_key("open_key", open_key)
        arguments = (pool_name, client_name, memory_id, *requested)
        found = self._opened_before((owner, open_key), arguments, now_seconds)
        if found:
            return found
        pool = self.pool(pool_name)
        check_memory_id(memory_id, has_ranks=pool.config.name in self.rank_groups)
        self.drain_state.check(pool.config.name)
        pool.check_serving()
        starts_epoch = needs_new_epoch(pool, memory_id)
        pool.quotas.check(quota)  # nothing is refused after this
        if starts_epoch:
            pool.begin_epoch(pool.config, pool.epoch + 1)
        pool.memory_id = memory_id
        holding = pool.quotas.open(quota)
        self._last_number += 1
        session_number = SessionNumber(self._last_number)
        values = (client_name, lease_seconds, now_seconds, open_key, arguments, holding)
        session = Session(session_id, session_number, *values, owner=owner, salt=salt)
        self._sessions[session_id] = (pool, session)
        if open_key:
            self._by_open_key[owner, open_key] = session
        pool.sessions[session_id] = session
        pool.activity.sessions_opened += 1
        return pool, session

    def opened_by(self, open_key: str, owner: str = "") -> SessionId | None:
        """The id of the open session that this owner opened with this key; None if there is none."""
        session = self._by_open_key.get((owner, open_key))
        return session.session_id if session else None

    def resume_session(
        self, session_id: str, sequence: int, *, resume_key: str, now_seconds: float
    ) -> tuple[KVCacheManager, Session]:
        """Moves a session to another process, with a new id and number. The call renews the lease.

        O(requests and unpublished blocks of the session). Blocks published before count as shared hits afterwards.

        Args:
            session_id: Any id that the session has had.
            sequence: A change whose result the process has received; 0 for none.
            resume_key: Random key of the caller, so that it can retry the call; empty to always resume again.
            now_seconds: The current time.

        Raises:
            InvalidArgumentError: The sequence is newer than the session's last change, or the key is too long.
            NotFoundError: No session ever had this id.
            AbortedError: The session has ended, or was later resumed with another key.
        """
        pool, session = self._live_session(session_id, now_seconds)
        check_range("sequence", sequence, 0, session.sequence)
        check_key("resume_key", resume_key)
        is_newest = session.is_newest_resumption(resume_key)
        if is_newest is False:
            raise ended_error("SESSION_RESUMED")
        if is_newest:
            pool.activity.retries += 1
        else:
            self._last_number += 1
            session.resume(resume_key, SessionNumber(self._last_number))
            pool.renumber_session(session.previous_number, session.session_number)
            key = session.session_id
            self._sessions[key] = self._sessions.pop(key)  # to the end, as both are ordered by number
            pool.sessions[key] = pool.sessions.pop(key)
        session.last_seen_seconds = now_seconds
        return pool, session

    def session(self, session_id: str, now_seconds: float) -> tuple[KVCacheManager, Session]:
        """Finds a session for its client. The call renews the lease.

        Raises:
            NotFoundError: No session ever had this id.
            AbortedError: The session was closed, its lease expired, the epoch ended, an operator ended it, another
                process resumed it, or its server lost its journal.
        """
        found = self._live_session(session_id, now_seconds)
        if found[1].current_id != session_id:
            raise ended_error("SESSION_RESUMED")
        found[1].last_seen_seconds = now_seconds
        return found

    def is_overdue(self, session_id: str, now_seconds: float) -> bool:
        """Whether the lease of a session has expired, so that `expire` will end it."""
        found = self._sessions.get(original_id(session_id))
        return found is not None and found[1].expires_seconds <= now_seconds

    def attach_stream(self, session: Session) -> None:
        """Records a stream, which keeps the session alive."""
        session.open_streams += 1

    def detach_stream(self, session: Session, now_seconds: float) -> None:
        """Records the end of a stream; the lease starts now."""
        session.open_streams -= 1
        session.last_seen_seconds = now_seconds

    def owner(self, session_id: str) -> tuple[PoolName, str] | None:
        """The pool and the owner of an open session; None if there is none. Does not renew the lease."""
        found = self._sessions.get(original_id(session_id))
        return (found[0].config.name, found[1].owner) if found else None

    def apply(self, pool: KVCacheManager, session: Session, step: Step, source: object = None) -> StepResult:
        """Applies a step of a session found with `session`; see `apply_step`."""
        return apply.apply_step(pool, session, step, source)

    def count_retry(self, pool: KVCacheManager) -> None:
        """Counts a retried change that the caller answered from its memory."""
        pool.activity.retries += 1

    def mark_executed(self, pool: KVCacheManager, session: Session, executed_sequence: int) -> None:
        """Publishes the blocks that a session filled up to an executed change.

        Raises:
            InvalidArgumentError: The change was not sent yet.
        """
        session.check_executed(executed_sequence, session.sequence)
        apply.mark_executed(pool, session, executed_sequence)

    def close_session(self, session_id: str, now_seconds: float) -> tuple[KVCacheManager, int]:
        """Frees a session's requests and ends it.

        Returns:
            The pool, and the number of freed requests.

        Raises:
            NotFoundError: The session does not exist.
            AbortedError: The session has already ended; if it was closed, `closed_count` gives the result.
        """
        pool, session = self.session(session_id, now_seconds)
        self._end(session.session_id, "SESSION_CLOSED", len(session.requests))
        pool.activity.sessions_closed += 1
        return pool, apply.end_session(pool, session)

    def closed_count(self, session_id: str) -> int | None:
        """Number of requests freed when a session was closed; None if it was not closed or is no longer remembered."""
        return self._ends.num_freed_by_close(session_id)

    def evict_session(
        self, pool_name: str, number: int, now_seconds: float, *, quarantine_seconds: float = 0.0
    ) -> tuple[KVCacheManager, Session]:
        """Ends a session at an operator's request; its blocks are freed at once or after a quarantine.

        Args:
            pool_name: The pool.
            number: Number of the session.
            now_seconds: The current time.
            quarantine_seconds: See `expire`.

        Returns:
            The pool and the session.

        Raises:
            NotFoundError: The pool does not exist, or has no session of this number.
        """
        pool, session = self.find_session(pool_name, number)
        self._end(session.session_id, "SESSION_EVICTED")
        pool.activity.evicted_sessions += 1
        apply.quarantine_session(pool, session, now_seconds, quarantine_seconds)
        return pool, session

    def find_session(self, pool_name: str, number: int) -> tuple[KVCacheManager, Session]:
        """Finds a session by its number. Does not renew the lease. O(sessions).

        Raises:
            NotFoundError: The pool does not exist, or has no session of this number.
        """
        pool = self.pool(pool_name)
        session = next((session for session in self.sessions_of(pool) if session.session_number == number), None)
        if session is None:
            message = f"pool {pool_name!r} has no session {number}"
            raise NotFoundError("SESSION_NOT_FOUND", message, field="session_number")
        return pool, session

    def expire(
        self, now_seconds: float, *, quarantine_seconds: float = 0.0
    ) -> list[tuple[KVCacheManager, Session, int]]:
        """Ends sessions with an expired lease; their blocks are freed at once or after a quarantine.

        Args:
            now_seconds: The current time.
            quarantine_seconds: Duration of the quarantine in pools where not all ranks answer fences; 0 to free at
                once.

        Returns:
            For each ended session: its pool, the session, and its number of requests.
        """
        due = [sid for sid, (_, session) in self._sessions.items() if session.expires_seconds <= now_seconds]
        return [self.expire_session(session_id, now_seconds, quarantine_seconds) for session_id in due]

    def expire_session(
        self, session_id: SessionId, now_seconds: float, quarantine_seconds: float
    ) -> tuple[KVCacheManager, Session, int]:
        """Ends one open session with an expired lease; see `expire`."""
        pool, session = self._end(session_id, "LEASE_EXPIRED")
        pool.activity.leases_expired += 1
        count = len(session.requests)
        apply.quarantine_session(pool, session, now_seconds, quarantine_seconds)
        return pool, session, count

    def end_due_quarantines(self, now_seconds: float) -> list[tuple[KVCacheManager, Quarantined]]:
        """Frees the blocks whose quarantine has passed; returns the ended sessions that held them, with their pools."""
        due = [(pool, pool.quarantine.due(now_seconds)) for pool in self._pools.values() if pool.quarantine]
        return [(pool, each) for pool, numbers in due for each in self.end_quarantine(pool.config.name, numbers)]

    def end_quarantine(self, pool_name: str, numbers: Sequence[SessionNumber]) -> list[Quarantined]:
        """Frees the quarantined blocks of ended sessions, as none of their steps can be in flight.

        Args:
            pool_name: The pool.
            numbers: Numbers of the sessions; those not in quarantine are ignored.

        Returns:
            The sessions that were in quarantine.

        Raises:
            NotFoundError: The pool does not exist.
        """
        pool = self.pool(pool_name)
        found = [each for each in map(pool.quarantine.find, numbers) if each]
        for each in found:
            apply.end_quarantine(pool, each)
        return found

    def lose_sessions(self) -> None:
        """Records that the state of earlier sessions was lost."""
        self._ends.mark_incomplete()
        self.lost_may_run = True

    def end_lost_steps(self) -> None:
        """Records that no step of a lost session can still run."""
        self.lost_may_run = False

    def renew_leases(self, now_seconds: float) -> None:
        """Restarts the lease of every open session, without streams, as this process has just started.

        Quarantines with a duration restart, too.
        """
        for _, session in self._sessions.values():
            session.open_streams = 0
            session.last_seen_seconds = now_seconds
        for pool in self._pools.values():
            pool.quarantine.restart_waits(now_seconds)

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
        if found[1].expires_seconds <= now_seconds:  # `expire` will free its blocks and report it
            raise ended_error("LEASE_EXPIRED")
        return found

    def _opened_before(
        self, owner_and_key: tuple[str, str], requested: tuple[object, ...], now_seconds: float
    ) -> tuple[KVCacheManager, Session] | None:
        session = self._by_open_key.get(owner_and_key)
        if session is None or session.expires_seconds <= now_seconds:
            return None
        if session.open_arguments != requested:
            message = "already opened a session with other arguments"
            raise InvalidArgumentError("open_key", message, reason="OPEN_KEY_REUSED")
        if session.current_id != session.session_id:
            raise ended_error("SESSION_RESUMED")
        pool = self._sessions[session.session_id][0]
        pool.activity.retries += 1
        session.last_seen_seconds = now_seconds
        return pool, session
