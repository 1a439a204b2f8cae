"""Blocks of sessions that were ended while a step of theirs may still run on a rank.

1. They stay held, in tables and ref counts, until they are released: nobody is given them. What was published in them
   may be hit meanwhile, since a full block is not written again.
2. Where all ranks answer fences they are released when every rank has said that no such step is in flight; else when
   their time is up. An epoch that passes drops them with all that the pool held.
3. A session that holds no block is not kept.
4. They are freed as by a session that closes: request by request, the oldest first.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.core.ids import BlockId, SessionNumber
from kvpool.core.sessions.session import Session


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A session that was ended, and still holds its blocks.

    Attributes:
        session: The session, its requests with their tables.
        since_seconds: When it was ended, on the server's monotonic clock.
        due_seconds: When it is released, on the same clock; infinity if that is when all ranks have answered.
    """

    session: Session
    since_seconds: float
    due_seconds: float


class Quarantine:
    """The sessions of one pool that were ended and still hold their blocks, in the order they were ended."""

    __slots__ = ("_by_number", "_num_blocks")

    def __init__(self) -> None:
        self._by_number: dict[SessionNumber, Quarantined] = {}
        self._num_blocks: int | None = 0
        """None if that is to be counted anew."""

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Quarantined]:
        return iter(tuple(self._by_number.values()))

    @property
    def num_blocks(self) -> int:
        """Blocks that they hold, each once. O(those) after a change, else O(1)."""
        if self._num_blocks is None:
            self._num_blocks = len(set(self._block_ids()))
        return self._num_blocks

    @property
    def numbers(self) -> tuple[SessionNumber, ...]:
        """The sessions' numbers."""
        return tuple(self._by_number)

    @property
    def next_due_seconds(self) -> float:
        """When the next is due; infinity if none has a time."""
        return min((each.due_seconds for each in self._by_number.values()), default=float("inf"))

    @property
    def awaiting_ranks(self) -> tuple[SessionNumber, ...]:
        """Numbers of those that are released when all ranks have answered."""
        return tuple(number for number, each in self._by_number.items() if each.due_seconds == float("inf"))

    def due(self, now_seconds: float) -> list[SessionNumber]:
        """Numbers of those whose time is up."""
        return [number for number, each in self._by_number.items() if each.due_seconds <= now_seconds]

    def find(self, number: SessionNumber) -> Quarantined | None:
        """A session by its number, if it is here."""
        return self._by_number.get(number)

    def add(self, quarantined: Quarantined) -> None:
        """Takes a session in, whose unpublished blocks are withdrawn."""
        self._by_number[quarantined.session.session_number] = quarantined
        self._num_blocks = None

    def remove(self, quarantined: Quarantined) -> None:
        """Lets a session go, whose requests are freed."""
        del self._by_number[quarantined.session.session_number]
        self._num_blocks = None

    def restart_waits(self, now_seconds: float) -> None:
        """Lets each wait all of its time from now, on a clock that was never looked at before."""
        for number, each in self._by_number.items():
            wait_seconds = each.due_seconds - each.since_seconds
            self._by_number[number] = Quarantined(each.session, now_seconds, now_seconds + wait_seconds)

    def clear(self) -> None:
        """Lets all go, as no block holds anything any more."""
        self._by_number.clear()
        self._num_blocks = 0

    def _block_ids(self) -> Iterator[BlockId]:
        for each in self._by_number.values():
            for request in each.session.requests.values():
                for table in request.tables:
                    yield from table.held_block_ids
