"""Judges a run by its logs: what broke a promise, and how long it took to go on after each kill.

A scheduler may lose its session only for a reason that the run gave: a lease that truly ran out, an epoch that passed
with a rank, a server that came back with nothing.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from crash.ownership import Session, conflicts, sessions_of
from crash.records import Record, read
from crash.scheduler import RANKED_POOL


@dataclass(slots=True)
class Verdict:
    """What came of a run.

    Attributes:
        violations: Promises that were broken, one line each.
        kills: How many, by what was killed and how.
        sessions: How many were opened.
        lost: How many were lost for a good reason, by reason.
        steps: How many were answered.
        blocks: How many were given, and how many of them were hits.
        recovery_seconds: By what was killed: from the kill to the next answered step of whom it concerns.
    """

    violations: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    sessions: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    blocks: Counter[str] = field(default_factory=Counter)
    recovery_seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def as_json(self) -> dict[str, object]:
        """For machines."""
        return {
            "violations": self.violations,
            "kills": dict(sorted(self.kills.items())),
            "sessions": self.sessions,
            "lost": dict(sorted(self.lost.items())),
            "steps": self.steps,
            "blocks": dict(self.blocks),
            "recovery": {
                kind: {
                    "count": len(seconds),
                    "p50_seconds": round(statistics.median(seconds), 3),
                    "max_seconds": round(max(seconds), 3),
                }
                for kind, seconds in sorted(self.recovery_seconds.items())
            },
        }


class Story:
    """What was done to the processes, by the log of who did it."""

    def __init__(self, records: Iterable[Record], *, journaled: bool) -> None:
        self.records = list(records)
        self.journaled = journaled
        self._presences: list[tuple[float, float]] = []
        begin = None
        for record in self.records:
            if record.get("target") != "server":
                continue
            if record["kind"] in ("starting", "cont"):
                begin = record["at"]
            elif record["kind"] in ("kill", "stop") and begin is not None:
                self._presences.append((begin, record["at"]))
                begin = None
        if begin is not None:
            self._presences.append((begin, float("inf")))

    def server_began_after(self, at: float) -> bool:
        """Whether the server was started anew since."""
        return any(r["kind"] == "starting" and r["at"] > at for r in self.records if r.get("target") == "server")

    def longest_presence(self, start: float, end: float) -> float:
        """For how long the server was there at a stretch, between two moments."""
        return max((min(end, gone) - max(start, came) for came, gone in self._presences), default=0.0)


def judge(folder: Path, *, journaled: bool) -> Verdict:
    """Judges the run whose logs are in a folder."""
    verdict = Verdict()
    story = Story(read(folder / "run.jsonl"), journaled=journaled)
    sessions: list[Session] = []
    told: dict[str, list[float]] = {}
    opened: dict[str, list[float]] = {}
    for path in sorted(folder.glob("scheduler-*.jsonl")):
        records = list(read(path))
        sessions += sessions_of(path.stem, records)
        told[path.stem] = [record["at"] for record in records if record["kind"] == "told"]
        opened[path.stem] = [record["at"] for record in records if record["kind"] == "opened"]
        for record in records:
            if record["kind"] == "told":
                verdict.steps += 1
                verdict.blocks["new"] += len(record["new"])
                verdict.blocks["hit"] += len(record["hit"])
    judge_sessions(verdict, sessions, story)
    verdict.violations += [f"{record['what']}: {record}" for record in story.records if record["kind"] == "violation"]
    ranked = {session.key[0] for session in sessions if session.pool == RANKED_POOL}
    _measure(verdict, story, Schedulers(told, opened, ranked))
    return verdict


def judge_sessions(verdict: Verdict, sessions: list[Session], story: Story) -> None:
    """Judges what schedulers were told."""
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
            return session.pool == RANKED_POOL
        case "SESSION_NOT_FOUND" | "POOL_NOT_FOUND":
            return not story.journaled and story.server_began_after(session.opened)
    return False


@dataclass(frozen=True, slots=True)
class Schedulers:
    """By a scheduler's name: when it was answered a step, and opened a session; and whose pool has ranks."""

    told: dict[str, list[float]]
    opened: dict[str, list[float]]
    ranked: set[str]

    def concerned(self, record: Record) -> list[str]:
        """Whom it concerns that a process is killed or stopped."""
        match record["target"]:
            case "scheduler":
                return [record["name"]]
            case "rank":
                return sorted(self.ranked)
        return list(self.told)

    def went_on(self, name: str, record: Record) -> float:
        """When a scheduler went on after that: a rank's memory is gone, so a session of before is of no use."""
        times = self.opened if record["target"] == "rank" else self.told
        return next((at for at in times[name] if at > record["at"]), float("inf"))


def _measure(verdict: Verdict, story: Story, schedulers: Schedulers) -> None:
    """Counts the kills, and takes the time until those whom they concern went on.

    Who was killed or stopped again before it went on counts with the last of these.
    """
    struck = [record for record in story.records if record["kind"] in ("kill", "stop")]
    for i, record in enumerate(struck):
        target = record["target"]
        verdict.kills[f"{target} {record['how']}"] += 1
        if record["kind"] == "stop":
            continue
        waits = []
        for name in schedulers.concerned(record):
            at = schedulers.went_on(name, record)
            again = any(each["at"] < at and name in schedulers.concerned(each) for each in struck[i + 1 :])
            if at != float("inf") and not again:
                waits.append(at - record["at"])
        if waits:
            verdict.recovery_seconds[f"{target}, first to go on"].append(min(waits))
            if target == "server":
                verdict.recovery_seconds["server, each scheduler"] += waits
