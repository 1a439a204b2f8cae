"""Who surely held which block when, by what each scheduler was told; and which of that cannot be.

A block is surely held from when the answer that gave it was here until the message that gives it back was sent, or its
session ended: at the latest at the first message that was never answered, and at the end of the lease that the last
answered one had begun. In between more may be held than is known, never less.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from crash.records import Record


@dataclass(slots=True, eq=False)
class Hold:
    """A block in the hands of one session.

    Attributes:
        session: Whose: the scheduler's name and the number of its session, in the order they were opened.
        block: The block.
        start: When it was surely held, seconds.
        end: When it was so no longer.
        is_hit: Whether it was found in the cache.
        content: What it holds, once it is full.
    """

    session: tuple[str, int]
    block: int
    start: float
    end: float = float("inf")
    is_hit: bool = False
    content: str = ""

    def agrees_with(self, earlier: "Hold") -> bool:
        """Whether both may be held at once, this one being the later."""
        return self.is_hit and self.content == earlier.content


@dataclass(slots=True)
class Session:
    """One session of a scheduler, as its log tells it.

    Attributes:
        key: The scheduler's name, and the number of its session.
        pool: Its pool.
        incarnation: Which pool of that name it was.
        lease_seconds: Its lease.
        opened: When the call that opened it was sent.
        sent: When the last message was sent that was answered.
        unanswered: When the first message was sent that was not; None if all were.
        sequence: Of its last answered step.
        holds: All that it was ever told to hold.
        ended: The record that it ended with, or None if its process just died.
        violations: What its scheduler noticed, or its log shows.
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
        """Goes on by one record."""
        match record["kind"]:
            case "ask":
                self.unanswered = record["at"]
            case "told":
                self._take_told(record)
            case "full":
                for block, content in record["blocks"]:
                    if block in self._open:
                        self._open[block].content = content
            case "violation":
                self.violations.append(record)

    def end(self, at: float, record: Record | None) -> None:
        """Ends it: at the latest when its last sign of life was written down."""
        self.ended = record
        last = at if self.unanswered is None else self.unanswered
        for block in list(self._open):
            self._release(block, min(last, self.sent + self.lease_seconds))

    def _take_told(self, record: Record) -> None:
        if record["seq"] != self.sequence + 1:
            self.violations.append({**record, "what": "SEQUENCE_GAP"})
        self.sequence, self.sent, self.unanswered = record["seq"], record["sent"], None
        for block in (*record["gone"], *record["new"]):
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
    """Yields the sessions of one scheduler's log, over all the lives of its process."""
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
    """Yields pairs of holds of different sessions that cannot have been at once, the earlier first."""
    by_block: defaultdict[tuple[str, int], list[Hold]] = defaultdict(list)
    for session in sessions:
        for hold in session.holds:
            if hold.end > hold.start:  # else it was told when the lease was over: its scheduler was stopped
                by_block[session.incarnation, hold.block].append(hold)
    for holds in by_block.values():
        active: list[Hold] = []
        for hold in sorted(holds, key=lambda hold: hold.start):
            active = [each for each in active if each.end > hold.start]
            for each in active:
                if each.session != hold.session and not hold.agrees_with(each):
                    yield each, hold
            active.append(hold)
