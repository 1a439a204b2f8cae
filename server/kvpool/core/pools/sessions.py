"""The sessions of all pools: the open ones by id, and how the others ended.

1. A session id is never reused. Sessions whose end is remembered, and unknown ones, are refused with different errors.
2. Open sessions are ordered by session number.
"""

from collections.abc import Iterable, Iterator

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import SessionEnd
from kvpool.core.ids import SessionId, SessionNumber
from kvpool.core.sessions.session import Session
from kvpool.core.sessions.session_ends import SessionEnds, ended_error


class SessionRegistry:
    """Sessions by id. Iterates over the open ones with their pools.

    Attributes:
        last_number: The newest session number in any pool; 0 before the first session.
        ends: How sessions ended.
    """

    def __init__(self) -> None:
        self.last_number = SessionNumber(0)
        self._by_id: dict[SessionId, tuple[KVCacheManager, Session]] = {}
        self._by_open_key: dict[tuple[str, str], Session] = {}
        self.ends = SessionEnds()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[tuple[KVCacheManager, Session]]:
        return iter(self._by_id.values())

    def __getitem__(self, session_id: str) -> tuple[KVCacheManager, Session]:
        """An open session."""
        return self._by_id[SessionId(session_id)]

    def get(self, session_id: str) -> tuple[KVCacheManager, Session] | None:
        """A session; None if it is not open."""
        return self._by_id.get(SessionId(session_id))

    def find(self, session_id: str, now_seconds: float) -> tuple[KVCacheManager, Session]:
        """Finds a session for its client. Does not renew the lease.

        Raises:
            NotFoundError: No open session has this id, and no remembered one had it (see `SessionEnds`). A server that
                restarts without a journal remembers none.
            AbortedError: The session was closed, its lease expired, the epoch ended, an operator ended it, a process
                of it has exited, or its server lost its journal.
        """
        found = self._by_id.get(SessionId(session_id))
        if found and found[1].open_streams:
            return found  # nearly always, and at no further cost: its lease does not expire
        if found is None:
            raise self.ends.error(session_id)
        if found[1].is_expired(now_seconds):  # `EndSession` will free its blocks and report it
            raise ended_error("LEASE_EXPIRED")
        return found

    def opened_by(self, open_key: str, owner: str = "") -> Session | None:
        """The open session that this owner opened with this key; None if there is none."""
        return self._by_open_key.get((owner, open_key))

    def num_of(self, owner: str) -> int:
        """Number of open sessions of an owner in all pools. O(sessions)."""
        return [session.owner for _, session in self].count(owner)

    def is_overdue(self, session_id: str, now_seconds: float) -> bool:
        """Whether the lease of an open session has expired."""
        found = self.get(session_id)
        return found is not None and found[1].is_expired(now_seconds)

    def due(self, now_seconds: float) -> list[SessionId]:
        """The open sessions whose lease has expired."""
        return [sid for sid, (_, session) in self._by_id.items() if session.is_expired(now_seconds)]

    def add(self, pool: KVCacheManager, session: Session) -> None:
        """Adds a new session, with the newest number."""
        self._by_id[session.session_id] = (pool, session)
        pool.sessions[session.session_number] = session
        if session.open_key:
            self._by_open_key[session.owner, session.open_key] = session

    def remove(self, session_id: SessionId, reason: str, num_freed_requests: int = 0) -> None:
        """Removes a session that ends, and remembers how; see `SessionEnds.remember`."""
        pool, session = self._by_id[session_id]
        del pool.sessions[session.session_number]
        self._forget(session, reason, num_freed_requests)

    def remove_all(self, pool: KVCacheManager, reason: str) -> None:
        """As `remove`, for all sessions of a pool, also after a bug in a change of one. O(sessions of all pools)."""
        pool.sessions.clear()
        for session in [session for its_pool, session in self if its_pool is pool]:
            self._forget(session, reason)

    def _forget(self, session: Session, reason: str, num_freed_requests: int = 0) -> None:
        self.ends.remember(session.session_id, reason, num_freed_requests)
        del self._by_id[session.session_id]
        key = (session.owner, session.open_key)
        if self._by_open_key.get(key) is session:  # otherwise the key opened another session after this one expired
            del self._by_open_key[key]

    def keyed(self) -> list[SessionId]:
        """The session that each open key opened."""
        return [session.session_id for session in self._by_open_key.values()]

    def restore(self, pools: Iterable[KVCacheManager], keyed: Iterable[SessionId]) -> None:
        """Restores the open sessions from the sessions of the pools. See `keyed`."""
        found = [(pool, session) for pool in pools for session in pool.sessions.values()]
        found.sort(key=lambda each: each[1].session_number)
        self._by_id = {session.session_id: (pool, session) for pool, session in found}
        for session_id in keyed:
            session = self._by_id[session_id][1]
            self._by_open_key[session.owner, session.open_key] = session


def end_of(pool: KVCacheManager, session: Session) -> SessionEnd:
    """A session as it ends."""
    return SessionEnd(
        pool.config.name,
        pool.epoch,
        session.session_id,
        session.session_number,
        session.client_name,
        len(session.requests),
    )
