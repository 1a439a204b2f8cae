"""All sessions of a server, over its pools: the one way in for whatever changes what a server holds.

1. A session id names one session for ever; one that was ended is told apart from one that never was.
2. Time, ids, random bytes and what a server's settings decide come in as arguments: the same calls in the same order
   give the same answers, also under other settings.
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
        new_block_lifetimes: Makes what samples how long the blocks of a new pool keep what they hold.

    Attributes:
        lost_may_run: Whether sessions of which nothing is known any more may run a last step yet.
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
        """Ends all sessions of a pool that lost a rank, and drops what its blocks held; it stays suspended.

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

    def open_session(  # noqa: PLR0913 - what the wire asks
        self,
        pool_name: str,
        client_name: str,
        lease_seconds: float,
        *,
        session_id: SessionId,
        now_seconds: float,
        open_key: str = "",
        asked_for: tuple[float, ...] = (),
        quota: Quota = NO_QUOTA,
        owner: str = "",
        salt: bytes = b"",
        memory_id: str = "",
    ) -> tuple[KVCacheManager, Session]:
        """Attaches a scheduler process to a pool; or finds the session that the same key opened, if it lives.

        A pool whose blocks are in another memory, that nobody uses any more, begins a new epoch first. O(num_blocks).

        Args:
            pool_name: The pool.
            client_name: What the process calls itself.
            lease_seconds: The lease, as `LeaseBounds.choose` gives it.
            session_id: The id of a session that is new.
            now_seconds: The time.
            open_key: Drawn by the caller, so that the call can be repeated; empty for a new session in any case.
            asked_for: What the caller asked for, of which lease and quota were chosen; compared when the key comes
                again, as are the pool, the client's name and the memory. Then lease and quota do not count.
            quota: What it can always have, and the most it may hold.
            owner: Name of the token that it belongs to; empty for none.
            salt: Sets its hashes apart; empty for those of the pool.
            memory_id: The memory that its engine holds the tensors in, see `memory`; empty if it does not say.

        Returns:
            The pool and the session, whose id is another than `session_id` if it was found; it is heard of by that.

        Raises:
            InvalidArgumentError: The client's name, the key, the memory or the quota is out of range, or the key was
                used for something else.
            AbortedError: The session that the key opened was resumed by another process.
            NotFoundError: There is no such pool.
            UnavailableError: The pool is drained or suspended, or another memory is in use.
            ExhaustedError: The quota's minimum cannot be guaranteed now.
        """
        if len(client_name.encode("utf-8", "surrogatepass")) > 256:  # noqa: PLR2004 - the proto states it
            raise InvalidArgumentError("client_name", "longer than 256 bytes")
        check_key("open_key", open_key)
        asked = (pool_name, client_name, memory_id, *asked_for)
        found = self._opened_before((owner, open_key), asked, now_seconds)
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
        said = (client_name, lease_seconds, now_seconds, open_key, asked, holding)
        session = Session(session_id, session_number, *said, owner=owner, salt=salt)
        self._sessions[session_id] = (pool, session)
        if open_key:
            self._by_open_key[owner, open_key] = session
        pool.sessions[session_id] = session
        pool.activity.sessions_opened += 1
        return pool, session

    def opened_by(self, open_key: str, owner: str = "") -> SessionId | None:
        """The session that is there and was opened with this key, by this owner."""
        session = self._by_open_key.get((owner, open_key))
        return session.session_id if session else None

    def resume_session(
        self, session_id: str, sequence: int, *, resume_key: str, now_seconds: float
    ) -> tuple[KVCacheManager, Session]:
        """Lets another process drive a session, which gets another id and number, and is heard of by that.

        O(its requests and unpublished blocks). What it had published before counts as another's where it hits that.

        Args:
            session_id: Any id that the session ever had.
            sequence: A change that the process knows to have been answered; 0 for none.
            resume_key: Drawn by the caller: the same key again finds the session as it was resumed by it. Empty for a
                new resumption in any case.
            now_seconds: The time.

        Raises:
            InvalidArgumentError: The sequence is of a change that was never made, or the key is too long.
            NotFoundError: There never was a session of this id.
            AbortedError: The session has ended, or was resumed with another key since this one.
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
            self._sessions[key] = self._sessions.pop(key)  # last, as both are in the order of their numbers
            pool.sessions[key] = pool.sessions.pop(key)
        session.last_seen_seconds = now_seconds
        return pool, session

    def session(self, session_id: str, now_seconds: float) -> tuple[KVCacheManager, Session]:
        """Finds a session for the process that drives it; it is heard of by that.

        Raises:
            NotFoundError: There never was one of this id.
            AbortedError: It was closed, its lease ran out, the epoch passed, an operator ended it, another process
                resumed it, or the server that had it lost its journal.
        """
        found = self._live_session(session_id, now_seconds)
        if found[1].current_id != session_id:
            raise ended_error("SESSION_RESUMED")
        found[1].last_seen_seconds = now_seconds
        return found

    def is_overdue(self, session_id: str, now_seconds: float) -> bool:
        """Whether `expire` would end a session."""
        found = self._sessions.get(original_id(session_id))
        return found is not None and found[1].expires_seconds <= now_seconds

    def attach_stream(self, session: Session) -> None:
        """Notes a stream that keeps a session alive."""
        session.open_streams += 1

    def detach_stream(self, session: Session, now_seconds: float) -> None:
        """Notes that such a stream has ended: the lease counts from now."""
        session.open_streams -= 1
        session.last_seen_seconds = now_seconds

    def owner(self, session_id: str) -> tuple[PoolName, str] | None:
        """The pool and the owner of an open session, which is not heard of by that; None if there is none."""
        found = self._sessions.get(original_id(session_id))
        return (found[0].config.name, found[1].owner) if found else None

    def apply(self, pool: KVCacheManager, session: Session, step: Step, source: object = None) -> StepResult:
        """Applies a step of a session that `session` found; see `apply_step`."""
        return apply.apply_step(pool, session, step, source)

    def count_retry(self, pool: KVCacheManager) -> None:
        """Counts a change that came again, and was answered from memory by the caller."""
        pool.activity.retries += 1

    def mark_executed(self, pool: KVCacheManager, session: Session, executed_sequence: int) -> None:
        """Lets others hit what the session filled up to a change that it says was executed.

        Raises:
            InvalidArgumentError: It was not sent yet.
        """
        session.check_executed(executed_sequence, session.sequence)
        apply.mark_executed(pool, session, executed_sequence)

    def close_session(self, session_id: str, now_seconds: float) -> tuple[KVCacheManager, int]:
        """Frees a session's requests and forgets it.

        Returns:
            Its pool, and how many requests were freed.

        Raises:
            NotFoundError: There is no such session.
            AbortedError: It has ended already; if it was closed, `closed_count` tells the answer again.
        """
        pool, session = self.session(session_id, now_seconds)
        self._end(session.session_id, "SESSION_CLOSED", len(session.requests))
        pool.activity.sessions_closed += 1
        return pool, apply.end_session(pool, session)

    def closed_count(self, session_id: str) -> int | None:
        """How many requests closing a session freed; None if it was not closed, or that is forgotten."""
        return self._ends.num_freed_by_close(session_id)

    def evict_session(
        self, pool_name: str, number: int, now_seconds: float, *, quarantine_seconds: float = 0.0
    ) -> tuple[KVCacheManager, Session]:
        """Ends a session as an operator asks; what it holds is freed, at once or from quarantine.

        Args:
            pool_name: The pool.
            number: The session's number.
            now_seconds: The time.
            quarantine_seconds: See `expire`.

        Returns:
            Its pool, and the session.

        Raises:
            NotFoundError: There is no such pool, or no session of this number in it.
        """
        pool, session = self.find_session(pool_name, number)
        self._end(session.session_id, "SESSION_EVICTED")
        pool.activity.evicted_sessions += 1
        apply.quarantine_session(pool, session, now_seconds, quarantine_seconds)
        return pool, session

    def find_session(self, pool_name: str, number: int) -> tuple[KVCacheManager, Session]:
        """Finds a session by its number, which is not heard of by that. O(sessions).

        Raises:
            NotFoundError: There is no such pool, or no session of this number in it.
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
        """Ends the sessions whose lease has run out; what they hold is freed, at once or from quarantine.

        Args:
            now_seconds: The time.
            quarantine_seconds: How long blocks are kept back in pools whose ranks do not all answer fences. 0: free at
                once.

        Returns:
            For each its pool, itself, and how many requests it had.
        """
        due = [sid for sid, (_, session) in self._sessions.items() if session.expires_seconds <= now_seconds]
        return [self.expire_session(session_id, now_seconds, quarantine_seconds) for session_id in due]

    def expire_session(
        self, session_id: SessionId, now_seconds: float, quarantine_seconds: float
    ) -> tuple[KVCacheManager, Session, int]:
        """Ends an open session as its lease has run out; see `expire`."""
        pool, session = self._end(session_id, "LEASE_EXPIRED")
        pool.activity.leases_expired += 1
        count = len(session.requests)
        apply.quarantine_session(pool, session, now_seconds, quarantine_seconds)
        return pool, session, count

    def end_due_quarantines(self, now_seconds: float) -> list[tuple[KVCacheManager, Quarantined]]:
        """Frees what was in quarantine for long enough; returns the sessions that held it, with their pools."""
        due = [(pool, pool.quarantine.due(now_seconds)) for pool in self._pools.values() if pool.quarantine]
        return [(pool, each) for pool, numbers in due for each in self.end_quarantine(pool.config.name, numbers)]

    def end_quarantine(self, pool_name: str, numbers: Sequence[SessionNumber]) -> list[Quarantined]:
        """Frees what ended sessions hold in quarantine, as no step of theirs can be in flight any more.

        Args:
            pool_name: The pool.
            numbers: The sessions; those that are in quarantine no more do not count.

        Returns:
            Those that were.

        Raises:
            NotFoundError: There is no such pool.
        """
        pool = self.pool(pool_name)
        found = [each for each in map(pool.quarantine.find, numbers) if each]
        for each in found:
            apply.end_quarantine(pool, each)
        return found

    def lose_sessions(self) -> None:
        """Notes that there were sessions of which nothing is known any more."""
        self._ends.mark_incomplete()
        self.lost_may_run = True

    def end_lost_steps(self) -> None:
        """Notes that no step of such a session can be running any more."""
        self.lost_may_run = False

    def renew_leases(self, now_seconds: float) -> None:
        """Gives every open session its whole lease from now, without a stream: this process did not listen before.

        What waits in quarantine for its time waits all of it from now.
        """
        for _, session in self._sessions.values():
            session.open_streams = 0
            session.last_seen_seconds = now_seconds
        for pool in self._pools.values():
            pool.quarantine.restart_waits(now_seconds)

    def next_expiry_seconds(self) -> float:
        """When the next lease or quarantine runs out, as things stand; infinity if none does."""
        leases = (session.expires_seconds for _, session in self._sessions.values())
        quarantines = (pool.quarantine.next_due_seconds for pool in self._pools.values())
        return min(chain(leases, quarantines), default=float("inf"))

    @property
    def last_session_number(self) -> SessionNumber:
        """The number that was given last to a session of any pool; 0 before the first."""
        return SessionNumber(self._last_number)

    @property
    def num_sessions(self) -> int:
        """Open sessions of all pools."""
        return len(self._sessions)

    def num_sessions_of(self, owner: str) -> int:
        """Open sessions of an owner, in all pools. O(sessions)."""
        return [session.owner for _, session in self._sessions.values()].count(owner)

    def sessions(self) -> Iterator[tuple[KVCacheManager, Session]]:
        """All open sessions with their pools, in the order they were opened or resumed: that of their numbers."""
        return iter(self._sessions.values())

    def _end(self, session_id: SessionId, reason: str, num_freed_requests: int = 0) -> tuple[KVCacheManager, Session]:
        pool, session = self._sessions.pop(session_id)
        self._ends.remember(session.current_id, reason, num_freed_requests)
        key = (session.owner, session.open_key)
        if self._by_open_key.get(key) is session:  # else its key opened another after it was overdue
            del self._by_open_key[key]
        del pool.sessions[session_id]
        return pool, session

    def _live_session(self, session_id: str, now_seconds: float) -> tuple[KVCacheManager, Session]:
        found = self._sessions.get(original_id(session_id))
        if found is None:
            raise self._ends.error(session_id)
        if found[1].expires_seconds <= now_seconds:  # `expire` will free its blocks, and tell
            raise ended_error("LEASE_EXPIRED")
        return found

    def _opened_before(
        self, owner_and_key: tuple[str, str], asked_for: tuple[object, ...], now_seconds: float
    ) -> tuple[KVCacheManager, Session] | None:
        session = self._by_open_key.get(owner_and_key)
        if session is None or session.expires_seconds <= now_seconds:
            return None
        if session.asked_for != asked_for:
            message = "opened a session with other arguments before"
            raise InvalidArgumentError("open_key", message, reason="OPEN_KEY_REUSED")
        if session.current_id != session.session_id:
            raise ended_error("SESSION_RESUMED")
        pool = self._sessions[session.session_id][0]
        pool.activity.retries += 1
        session.last_seen_seconds = now_seconds
        return pool, session
