"""How sessions ended: for those who still call, and for a close that is sent again.

1. An end is remembered under the id that the session was opened with, whatever resumed it since.
2. At most REMEMBERED_ENDS are kept; of a session that was forgotten it is told that it never was.
3. Once sessions were lost, nobody is told that a session never was.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import AbortedError, KvpoolError, NotFoundError
from kvpool.core.ids import SessionId
from kvpool.core.sessions.session import original_id

REMEMBERED_ENDS: Final = 4096
_ENDS: Final = {
    "LEASE_EXPIRED": "the session's lease ran out; its blocks are given to others",
    "EPOCH_PASSED": "a rank of the pool was lost, and what its blocks held; open a new session, compute again",
    "SESSION_EVICTED": "an operator ended the session; its blocks are given to others",
    "SESSION_CLOSED": "the session was closed",
    "SESSION_RESUMED": "another process has taken the session over",
    "JOURNAL_DROPPED": "the server was started anew and knows its sessions no more; open a new one, compute again",
}
"""By reason: why a session's id is no good any more."""


@dataclass(frozen=True, slots=True)
class _End:
    reason: str
    last_id: SessionId
    num_freed_requests: int


class SessionEnds:
    """What is remembered of sessions that have ended."""

    def __init__(self) -> None:
        self._ends: OrderedDict[SessionId, _End] = OrderedDict()
        self._is_incomplete = False

    def remember(self, last_id: SessionId, reason: str, num_freed_requests: int = 0) -> None:
        """Notes that a session has ended.

        Args:
            last_id: The id that it was driven by in the end.
            reason: One of the reasons that are known here.
            num_freed_requests: What closing it is answered with.
        """
        self._ends[original_id(last_id)] = _End(reason, last_id, num_freed_requests)
        if len(self._ends) > REMEMBERED_ENDS:
            self._ends.popitem(last=False)

    def mark_incomplete(self) -> None:
        """Notes that there may have been sessions of which nothing is known."""
        self._is_incomplete = True

    def error(self, session_id: str) -> KvpoolError:
        """What a call is told whose session is not open."""
        end = self._ends.get(original_id(session_id))
        if end:
            return ended_error(end.reason)
        if self._is_incomplete:
            return ended_error("JOURNAL_DROPPED")
        return NotFoundError("SESSION_NOT_FOUND", "no such session", field="session_id")

    def num_freed_by_close(self, session_id: str) -> int | None:
        """What closing a session was answered with; None if it was not closed by whoever had this id."""
        end = self._ends.get(original_id(session_id))
        return end.num_freed_requests if end and (end.reason, end.last_id) == ("SESSION_CLOSED", session_id) else None


def ended_error(reason: str) -> AbortedError:
    """What a session is told that was ended for one of the reasons above."""
    return AbortedError(reason, _ENDS[reason], field="session_id")
