"""Judges a run by its logs: the violations, and the recovery time after each kill.

A scheduler may lose its session only for a reason that the run caused: a lease that really expired, an epoch that ended
with a rank, or a server that restarted without its state. In a cluster the last is no reason, and a takeover renews the
leases.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Final

from crash.ownership import Session, conflicts, sessions_of
from crash.records import Record, read
from crash.scheduler import LENT_POOL, RANKED_POOL
from kvpool.core.pause_tolerant_clock import MAX_RUN_SECONDS

_NEVER: Final = float("inf")
_RANK_SECONDS: Final = 10.0
"""Time in which a killed or stopped rank may end sessions, those included that were opened before it was missed."""


@dataclass(slots=True)
class Verdict:
    """Result of a run.

    Attributes:
        violations: Violations, one line each.
        kills: Number of kills, by target and method.
        sessions: Number of opened sessions.
        lost: Number of sessions lost for a valid reason, by reason.
        steps: Number of answered steps.
        blocks: Number of allocated blocks, and of hits among them.
        recovery_seconds: By target: times from a kill to the next answered step of an affected scheduler.
    """

    violations: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    blocks: Counter[str] = field(default_factory=Counter)
    recovery_seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def kinds(self) -> set[str]:
        """Kinds of the violations."""
        return {line.partition(":")[0] for line in self.violations}


@dataclass(frozen=True, slots=True)
class _Presence:
    """A time in which a server serves. Leases begin again with the next presence.

    Attributes:
        start: Beginning, in seconds.
        end: End.
        pauses: Times in which leases did not run.
    """

    start: float
    end: float
    pauses: Sequence[tuple[float, float]] = ()

    def seconds(self, start: float, end: float) -> float:
        """Time of this presence between two times, without the pauses."""
        start, end = max(start, self.start), min(end, self.end)
        paused = sum(max(min(end, until) - max(start, since), 0.0) for since, until in self.pauses)
        return max(end - start, 0.0) - paused


def _lives(records: list[Record]) -> Iterator[_Presence]:
    """The times in which the only server runs, or is stopped. Leases begin again only if it is started again."""
    begin, pauses = None, list[tuple[float, float]]()
    for record in records:
        if record.get("target") != "server":
            continue
        at = record["at"]
        match record["kind"]:
            case "starting":
                begin, pauses = at, []
            case "kill" if begin is not None:
                yield _Presence(begin, at, pauses)
                begin = None
            case "stop":
                pauses.append((at + MAX_RUN_SECONDS, _NEVER))
            case "cont":
                pauses[-1] = (pauses[-1][0], at)
    if begin is not None:
        yield _Presence(begin, _NEVER, pauses)


def _terms(records: list[Record]) -> Iterator[_Presence]:
    """The times of the primaries of a shard, each until it is killed or there is another primary.

    A strike that causes no takeover renews no lease.
    """

    server, begin, pauses = None, 0.0, list[tuple[float, float]]()
    for record in records:
        at = record["at"]
        match record["kind"]:
            case "became primary":
                if server:
                    yield _Presence(begin, at, pauses)
                server, begin, pauses = record["server"], at, []
            case "kill" if server in record.get("servers", ()):
                yield _Presence(begin, at, pauses)
                server = None
            case "paused" if record["server"] == server:
                pauses.append((at + MAX_RUN_SECONDS, _NEVER))
            case "continued" if record["server"] == server and pauses:
                pauses[-1] = (pauses[-1][0], at)
    if server:
        yield _Presence(begin, _NEVER, pauses)


class Story:
    """Actions on the processes, from the log of the run."""

    def __init__(self, records: Iterable[Record], *, journaled: bool, is_cluster: bool = False) -> None:
        self.records = sorted(records, key=itemgetter("at"))
        self.journaled = journaled
        self.is_cluster = is_cluster
        self._presences = list(_terms(self.records) if is_cluster else _lives(self.records))

    def server_began_after(self, at: float) -> bool:
        """Whether the server was restarted after a time."""
        return any(r["kind"] == "starting" and r["at"] > at for r in self.records if r.get("target") == "server")

    def rank_was_struck(self, start: float, end: float) -> bool:
        """Whether a rank was missing at some time between two times, as it was killed or stopped."""
        struck = (r for r in self.records if r.get("target") == "rank" and r["kind"] in ("kill", "stop"))
        return any(start - _RANK_SECONDS < record["at"] < end for record in struck)

    def longest_presence(self, start: float, end: float) -> float:
        """Longest time that a server was present between two times, without a restart or a takeover."""
        return max((presence.seconds(start, end) for presence in self._presences), default=0.0)


def judge(folder: Path, *, journaled: bool, is_cluster: bool = False) -> Verdict:
    """Judges the run whose logs are in a folder."""
    verdict = Verdict()
    story = Story(read(folder / "run.jsonl"), journaled=journaled, is_cluster=is_cluster)
    sessions: list[Session] = []
    answered: dict[str, list[float]] = {}
    opened: dict[str, list[float]] = {}
    for path in sorted(folder.glob("scheduler-*.jsonl")):
        records = list(read(path))
        sessions += sessions_of(path.stem, records)
        answered[path.stem] = [record["at"] for record in records if record["kind"] == "answered"]
        opened[path.stem] = [record["at"] for record in records if record["kind"] == "opened"]
        for record in records:
            if record["kind"] == "answered":
                verdict.steps += 1
                verdict.blocks["new"] += len(record["new"])
                verdict.blocks["hit"] += len(record["hit"])
    judge_sessions(verdict, sessions, story)
    verdict.violations += [f"{record['what']}: {record}" for record in story.records if record["kind"] == "violation"]
    ranked, lent = ({each.key[0] for each in sessions if each.pool == pool} for pool in (RANKED_POOL, LENT_POOL))
    _measure(verdict, story, Schedulers(answered, opened, ranked, lent))
    return verdict


def judge_sessions(verdict: Verdict, sessions: list[Session], story: Story) -> None:
    """Judges the answers to the schedulers."""
    verdict.sessions += len(sessions)
    for session in sessions:
        verdict.violations += [f"{record['what']}: {session.key} {record}" for record in session.violations]
        ended = session.ended
        if ended and ended["kind"] == "left":
            verdict.lost[f"left, {ended['reason']}"] += 1
        elif ended and ended["kind"] == "lost":
            if _may_be_lost(session, ended, story):
                verdict.lost[ended["reason"]] += 1
            else:
                verdict.violations.append(f"LOST: {session.key} {ended} last answered {session.sent}")
    for earlier, later in conflicts(sessions):
        verdict.violations.append(f"TWO_OWNERS: {earlier} {later}")


def _may_be_lost(session: Session, ended: Record, story: Story) -> bool:
    match ended["reason"]:
        case "LEASE_EXPIRED":
            return story.longest_presence(session.sent, ended["at"]) >= session.lease_seconds
        case "EPOCH_PASSED":
            is_ranked = session.pool in (RANKED_POOL, LENT_POOL)
            return is_ranked and (not story.is_cluster or story.rank_was_struck(session.opened, ended["at"]))
        case "SESSION_NOT_FOUND" | "POOL_NOT_FOUND":
            return not story.journaled and story.server_began_after(session.opened)
    return False


@dataclass(frozen=True, slots=True)
class Schedulers:
    """Times of answered steps and of opened sessions by scheduler, and the schedulers of pools of ranks, by pool."""

    answered: dict[str, list[float]]
    opened: dict[str, list[float]]
    ranked: set[str]
    lent: set[str]

    def affected(self, record: Record) -> list[str]:
        """Schedulers affected by killing or stopping a process."""
        match record["target"]:
            case "scheduler":
                return [record["name"]]
            case "rank":
                return sorted(self.ranked)
            case "lender":
                return sorted(self.lent)
        return list(self.answered)

    def continued_at(self, name: str, record: Record) -> float:
        """Time at which a scheduler continued. After a rank was killed, it needs a new session."""
        times = self.opened if record["target"] == "rank" else self.answered
        return next((at for at in times[name] if at > record["at"]), float("inf"))


def _measure(verdict: Verdict, story: Story, schedulers: Schedulers) -> None:
    """Counts the kills, and measures the time until the affected schedulers continue.

    A scheduler that is affected again before it continues counts for the last kill only.
    """
    struck = [record for record in story.records if record["kind"] in ("kill", "stop")]
    for i, record in enumerate(struck):
        target = record["target"]
        verdict.kills[f"{target} {record['how']}"] += 1
        if record["kind"] == "stop":
            continue
        waits = []
        for name in schedulers.affected(record):
            at = schedulers.continued_at(name, record)
            again = any(each["at"] < at and name in schedulers.affected(each) for each in struck[i + 1 :])
            if at != float("inf") and not again:
                waits.append(at - record["at"])
        if waits:
            verdict.recovery_seconds[f"{target}, first to go on"].append(min(waits))
            if target == "server":
                verdict.recovery_seconds["server, each scheduler"] += waits
