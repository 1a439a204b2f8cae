"""How sessions ended: for later calls with their ids, and for a close that is sent again.

1. At most REMEMBERED_ENDS ends are kept. A call for an older session gets "no such session".
2. After sessions were lost, no call gets "no such session".
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import AbortedError, KvpoolError, NotFoundError
from kvpool.core.ids import SessionId

REMEMBERED_ENDS: Final = 4096
_ENDS: Final = {
    "LEASE_EXPIRED": "the session's lease expired; its blocks may be allocated to other sessions",
    "EPOCH_PASSED": "the contents of the pool's blocks were lost, with a rank or after a bug; open a new session",
    "SESSION_EVICTED": "an operator ended the session; its blocks may be allocated to other sessions",
    "PROCESS_GONE": "a process of this session has exited; its blocks may be allocated to other sessions",
    "SESSION_CLOSED": "the session was closed",
    "JOURNAL_DROPPED": "the server was restarted without its sessions; open a new session and recompute",
}
"""Message for a call with the id of an ended session, by reason."""


@dataclass(frozen=True, slots=True)
class RememberedEnd:
    """How a session ended; see `SessionEnds.remember`."""

    reason: str
    session_id: SessionId
    num_freed_requests: int


class SessionEnds:
    """The remembered ends of sessions.

    Attributes:
        is_incomplete: Whether sessions may have existed of which nothing is known.
    """

    def __init__(self) -> None:
        self._ends: OrderedDict[SessionId, RememberedEnd] = OrderedDict()
        self.is_incomplete = False

    def remember(self, session_id: SessionId, reason: str, num_freed_requests: int = 0) -> None:
        """Records that a session has ended.

        Args:
            session_id: The session.
            reason: One of the reasons in `_ENDS`.
            num_freed_requests: The answer to the call that closed it.
        """
        self._ends[session_id] = RememberedEnd(reason, session_id, num_freed_requests)
        if len(self._ends) > REMEMBERED_ENDS:
            self._ends.popitem(last=False)

    def all(self) -> list[RememberedEnd]:
        """All remembered ends, oldest first. `remember` them to make an equal object."""
        return list(self._ends.values())

    def error(self, session_id: str) -> KvpoolError:
        """Returns the error for a call whose session is not open."""
        end = self._ends.get(SessionId(session_id))
        if end:
            return ended_error(end.reason)
        if self.is_incomplete:
            return ended_error("JOURNAL_DROPPED")
        return NotFoundError("SESSION_NOT_FOUND", "no such session", field="session_id")

    def num_freed_by_close(self, session_id: str) -> int | None:
        """Returns the answer to closing a session; None if it was not closed."""
        end = self._ends.get(SessionId(session_id))
        return end.num_freed_requests if end and end.reason == "SESSION_CLOSED" else None


def ended_error(reason: str) -> AbortedError:
    """Returns the error for a session that ended for one of the reasons above."""
    return AbortedError(reason, _ENDS[reason], field="session_id")
