"""Frees the blocks of sessions that end."""

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.sessions.quarantine import Quarantined
from kvpool.core.sessions.session import Session


def end_session(pool: KVCacheManager, session: Session) -> int:
    """Frees a session's requests, oldest first, and hides its cached blocks that were not reported as executed.

    Returns:
        The number of freed requests.
    """
    _hide_unexecuted(pool, session)
    return _free_requests(pool, session)


def quarantine_session(pool: KVCacheManager, session: Session, now_seconds: float, quarantine_seconds: float) -> None:
    """Ends a session whose last step may still run; its blocks are freed at once or after a quarantine.

    The quarantine lasts `quarantine_seconds`, or until all ranks have answered a fence if the pool's ranks fence.
    """
    due_seconds = float("inf") if pool.ranks_fence else now_seconds + quarantine_seconds
    if due_seconds <= now_seconds or not any(request.holds_blocks for request in session.requests.values()):
        end_session(pool, session)
        return
    _hide_unexecuted(pool, session)
    pool.quarantine.add(Quarantined(session, now_seconds, due_seconds))


def end_quarantine(pool: KVCacheManager, quarantined: Quarantined) -> None:
    """Frees the blocks of an ended session in quarantine."""
    pool.quarantine.remove(quarantined)
    _free_requests(pool, quarantined.session)


def _hide_unexecuted(pool: KVCacheManager, session: Session) -> None:
    """Hides the cached blocks of an ended session that were not reported as executed, and ends its quota."""
    pool.evict_unpublished(session.session_number)
    if session.holding:
        pool.quotas.end(session.holding, session.requests.values())
        session.holding = None


def _free_requests(pool: KVCacheManager, session: Session) -> int:
    requests = list(session.requests.values())
    for request in requests:
        pool.free(request)
        session.forget(request)
    return len(requests)
