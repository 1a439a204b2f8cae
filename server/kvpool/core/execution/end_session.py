"""Frees the blocks of sessions that end.

A session closes in parts, each in a turn of its own, because others wait meanwhile: 40,000 requests took 270 ms, now
11 ms; a session with all of 2^24 blocks takes 18 s. Each part is recorded, so a close that a crash cut off continues. A
list of blocks that wait to be freed would be simpler, but then RemovePool refuses after a close has returned. Expired
leases and quarantines are not divided: they have no caller whose turns the parts could take.
"""

from collections.abc import Iterator
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.sessions.quarantine import Quarantined
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session

MAX_PART_BLOCKS: Final = 8192
"""Number of blocks that are freed in one turn of a session that closes, about 10 ms."""
_REQUEST_BLOCKS: Final = 8
"""Number of blocks that take as long to free as a request without blocks."""


def is_large(pool: KVCacheManager, session: Session) -> bool:
    """Whether the end of a session takes more than a turn. O(MAX_PART_BLOCKS)."""
    if len(pool.blocks.prefix_map.pending.first_of(session.session_number, MAX_PART_BLOCKS)) == MAX_PART_BLOCKS:
        return True
    return len(session.requests) > len(list(_first_requests(session)))


def free_part(pool: KVCacheManager, session: Session) -> int:
    """Frees a part of what a session holds, in the order of `end_session`.

    Returns:
        The number of freed requests.
    """
    pending = pool.blocks.prefix_map.pending.first_of(session.session_number, MAX_PART_BLOCKS)
    if pending:
        pool.blocks.evict_blocks(pending)
        return 0
    requests = list(_first_requests(session))
    session.before_change(requests)
    for request in requests:
        session.num_running -= request.num_computed_tokens > 0
        pool.free(request)
        session.forget(request)
    return len(requests)


def _first_requests(session: Session) -> Iterator[Request]:
    """The oldest requests, until one exceeds the part."""
    left = MAX_PART_BLOCKS
    for request in session.requests.values():
        if left <= 0:
            return
        left -= _REQUEST_BLOCKS + sum([len(table.block_ids) - table.num_skipped for table in request.tables])
        yield request


def end_session(pool: KVCacheManager, session: Session) -> None:
    """Frees a session's requests, oldest first, and hides its cached blocks that were not reported as executed."""
    _hide_unexecuted(pool, session)
    _free_requests(pool, session)
    pool.in_flight.release(session.session_number)


def quarantine_session(pool: KVCacheManager, session: Session, now_seconds: float, quarantine_seconds: float) -> None:
    """Ends a session whose last step may still run; its blocks are freed at once or after a quarantine.

    The quarantine lasts `quarantine_seconds`, or until all ranks have answered a fence if the pool's ranks fence.
    """
    due_seconds = float("inf") if pool.ranks_fence else now_seconds + quarantine_seconds
    if due_seconds <= now_seconds:
        end_session(pool, session)
        return
    freed = pool.in_flight.take_over(session.session_number)
    host = pool.blocks.host
    copies = session.copies or (host and host.has_waiting(session.session_number, session.sequence))
    holds_blocks = copies or any(request.holds_blocks for request in session.requests.values())
    if not freed and not holds_blocks:
        end_session(pool, session)
        return
    _hide_unexecuted(pool, session)
    pool.quarantine.add(Quarantined(session, now_seconds, due_seconds, freed))


def end_quarantine(pool: KVCacheManager, quarantined: Quarantined) -> None:
    """Frees the blocks of an ended session in quarantine."""
    pool.quarantine.remove(quarantined)
    _free_requests(pool, quarantined.session)
    for group_id, block_ids in quarantined.freed:
        pool.in_flight.free(group_id, block_ids)
    pool.in_flight.release(quarantined.session.session_number)


def _hide_unexecuted(pool: KVCacheManager, session: Session) -> None:
    """Hides the cached blocks of an ended session that were not reported as executed, and ends its quota."""
    pool.evict_pending(session.session_number)
    if session.holding:
        pool.quotas.end(session.holding, session.requests.values())
        session.holding = None


def _free_requests(pool: KVCacheManager, session: Session) -> None:
    session.before_change(session.requests.values())
    for request in list(session.requests.values()):
        pool.free(request)
        session.forget(request)
    if session.copies:
        pool.release_copies(session, session.sequence)
