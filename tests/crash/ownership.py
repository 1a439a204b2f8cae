"""Periods in which a session certainly held a block, derived from its scheduler's answers, and their conflicts.

A block is certainly held from the arrival of the answer that allocated it until the message that frees it is sent, or
the session ends. The hold ends at the latest at the first message that was never answered, and at the end of the lease
that the last answered message renewed. A session may hold more than is known here, but never less.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from crash.records import Record


@dataclass(slots=True, eq=False)
class Hold:
    """A period in which one session held a block.

    Attributes:
        session: The scheduler's name, and the number of its session in order of opening.
        block: The block.
        start: Beginning of the hold, in seconds.
        end: End of the hold.
        is_hit: Whether the block was a cache hit.
        content: Content of the block when it is full.
    """

    session: tuple[str, int]
    block: int
    start: float
    end: float = float("inf")
    is_hit: bool = False
    content: str = ""

    def agrees_with(self, earlier: "Hold") -> bool:
        """Whether this hold may overlap with an earlier one."""
        return self.is_hit and self.content == earlier.content


@dataclass(slots=True)
class Session:
    """One session of a scheduler, read from its log.

    Attributes:
        key: The scheduler's name, and the number of its session.
        pool: Its pool.
        incarnation: Incarnation of the pool of that name.
        lease_seconds: Its lease.
        opened: Time at which the call that opened it was sent.
        sent: Time at which the last answered message was sent.
        unanswered: Time at which the first unanswered message was sent; None if all were answered.
        sequence: Number of the last answered step.
        holds: All its holds.
        ended: The record that ended it; None if its process died.
        violations: Violations noticed by the scheduler or found in its log.
    """

    key: tuple[str, int]
    pool: str
    incarnation: str
    lease_seconds: float
    opened: float
    sent: float
    unanswered: float | None = None
    sequence: int = 0
    holds: list[Hold] = field(default_factory=list)
    ended: Record | None = None
    violations: list[Record] = field(default_factory=list)
    _open: dict[int, Hold] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        """Applies one record."""
        match record["kind"]:
            case "ask":
                self.unanswered = record["at"]
            case "answered":
                self._take_answer(record)
            case "full":
                for block, content in record["blocks"]:
                    if block in self._open:
                        self._open[block].content = content
            case "violation":
                self.violations.append(record)

    def end(self, at: float, record: Record | None) -> None:
        """Ends the session, at the latest at its last record."""
        self.ended = record
        last = at if self.unanswered is None else self.unanswered
        for block in list(self._open):
            self._release(block, min(last, self.sent + self.lease_seconds))

    def _take_answer(self, record: Record) -> None:
        if record.get("first", record["seq"]) != self.sequence + 1:  # a refused step is sent again with another number
            self.violations.append({**record, "what": "SEQUENCE_GAP"})
        self.sequence, self.sent, self.unanswered = record["seq"], record["sent"], None
        for block in (*record["gone"], *record["new"], *(block for block, _ in record["hit"])):
            self._release(block, record["sent"])
        for block in record["new"]:
            self._hold(Hold(self.key, block, record["at"]))
        for block, content in record["hit"]:
            self._hold(Hold(self.key, block, record["at"], is_hit=True, content=content))

    def _hold(self, hold: Hold) -> None:
        self._open[hold.block] = hold
        self.holds.append(hold)

    def _release(self, block: int, at: float) -> None:
        hold = self._open.pop(block, None)
        if hold:
            hold.end = max(at, hold.start)


def sessions_of(name: str, records: Iterable[Record]) -> Iterator[Session]:
    """Yields the sessions of one scheduler's log, over all its processes."""
    current: Session | None = None
    count, at = 0, 0.0
    for record in records:
        kind = record["kind"]
        if current and kind in ("start", "lost", "left", "closed"):
            current.end(at, None if kind == "start" else record)
            yield current
            current = None
        elif kind == "opened":
            count += 1
            current = Session(
                (name, count), record["pool"], record["incarnation"], record["lease"], record["sent"], record["sent"]
            )
        elif current:
            current.take(record)
        at = record["at"]
    if current:
        current.end(at, None)
        yield current


def conflicts(sessions: Iterable[Session]) -> Iterator[tuple[Hold, Hold]]:
    """Yields conflicting pairs of holds of different sessions, the earlier one first."""
    by_block: defaultdict[tuple[str, int], list[Hold]] = defaultdict(list)
    for session in sessions:
        for hold in session.holds:
            if hold.end > hold.start:  # else the answer was read after the lease ended: its scheduler was stopped
                by_block[session.incarnation, hold.block].append(hold)
    for holds in by_block.values():
        active: list[Hold] = []
        for hold in sorted(holds, key=lambda hold: hold.start):
            active = [each for each in active if each.end > hold.start]
            for each in active:
                if each.session != hold.session and not hold.agrees_with(each):
                    yield each, hold
            active.append(hold)
