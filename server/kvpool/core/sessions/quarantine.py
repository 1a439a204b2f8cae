"""Quarantine: blocks of ended sessions whose last step may still run on a rank.

1. The blocks stay held, in tables and reference counts, until the quarantine ends. They are not allocated to other
   requests. Published blocks can be hit meanwhile, because a full block is not written again.
2. If all ranks answer fences, the quarantine ends when every rank has reported that no such step is in flight.
   Otherwise it ends after a fixed time. A new epoch drops the quarantine together with all blocks of the pool.
3. A session that holds no block is not quarantined. Blocks that it has freed and that wait for its steps count as held
   (`StepsInFlight`).
4. The blocks are freed as when a session closes: request by request, oldest first. Those that it had freed follow.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.core.ids import BlockId, GroupId, SessionNumber
from kvpool.core.sessions.session import Session


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An ended session that still holds its blocks.

    Attributes:
        session: The session, with its requests and their tables.
        since_seconds: When the session ended, on the server's monotonic clock.
        due_seconds: When the quarantine ends, on the same clock; infinity if it ends when all ranks have answered.
        freed: The blocks that the session had freed and its steps may still use, by group.
    """

    session: Session
    since_seconds: float
    due_seconds: float
    freed: list[tuple[GroupId, list[BlockId]]]


class Quarantine:
    """The ended sessions of one pool that still hold their blocks, in the order in which they ended."""

    __slots__ = ("_by_number", "_num_blocks")

    def __init__(self) -> None:
        self._by_number: dict[SessionNumber, Quarantined] = {}
        self._num_blocks: int | None = 0
        """None if the blocks must be counted again."""

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Quarantined]:
        return iter(tuple(self._by_number.values()))

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks that the sessions hold. O(blocks held) after a change, else O(1)."""
        if self._num_blocks is None:
            self._num_blocks = len(set(self._block_ids()))
        return self._num_blocks

    @property
    def numbers(self) -> tuple[SessionNumber, ...]:
        """Numbers of the sessions."""
        return tuple(self._by_number)

    @property
    def next_due_seconds(self) -> float:
        """When the next quarantine ends; infinity if none ends at a fixed time."""
        return min((each.due_seconds for each in self._by_number.values()), default=float("inf"))

    @property
    def awaiting_ranks(self) -> list[SessionNumber]:
        """Numbers of the sessions whose quarantine ends when all ranks have answered."""
        return [number for number, each in self._by_number.items() if each.due_seconds == float("inf")]

    def due(self, now_seconds: float) -> list[SessionNumber]:
        """Numbers of the sessions whose time has passed."""
        return [number for number, each in self._by_number.items() if each.due_seconds <= now_seconds]

    def find(self, number: SessionNumber) -> Quarantined | None:
        """Returns a session by its number, if it is in quarantine."""
        return self._by_number.get(number)

    def add(self, quarantined: Quarantined) -> None:
        """Adds a session. The caller has withdrawn its pending blocks."""
        self._by_number[quarantined.session.session_number] = quarantined
        self._num_blocks = None

    def remove(self, quarantined: Quarantined) -> None:
        """Removes a session. The caller frees its requests."""
        del self._by_number[quarantined.session.session_number]
        self._num_blocks = None

    def restart_waits(self, now_seconds: float) -> None:
        """Restarts the full wait of each session at `now_seconds`, because the clock's origin has changed."""
        for number, each in self._by_number.items():
            wait_seconds = each.due_seconds - each.since_seconds
            self._by_number[number] = Quarantined(each.session, now_seconds, now_seconds + wait_seconds, each.freed)

    def clear(self) -> None:
        """Removes all sessions, because the blocks were dropped."""
        self._by_number.clear()
        self._num_blocks = 0

    def _block_ids(self) -> Iterator[BlockId]:
        for each in self._by_number.values():
            for copy in each.session.copies:
                yield from copy.held_block_ids
            for request in each.session.requests.values():
                for table in request.tables:
                    yield from table.held_block_ids
            for _, block_ids in each.freed:
                yield from block_ids
