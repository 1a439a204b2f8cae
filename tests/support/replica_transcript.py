"""Transcripts of replicas: a command per event, followed by what the replica does, as in the tests of etcd's raft.

A command begins with `>`; the lines after it are its output, without those that did not change. `#` begins a comment.
Servers have names of one letter.

    # b has caught up, so a adds it.
    > ack a b 7
    sends at revision 1: term 1, primary a, in sync a b
    a: primary, term 1; revision 1, in sync a; awaits b; confirmed 7 of 9

| command | event |
|---|---|
| `write term=3 primary=a in-sync=a,b` | another server, or an operator, writes the record |
| `delete` | the shard is removed |
| `start a [without-state] [known-term=3] [claim-term=4] [min-in-sync=2]` | a starts |
| `lead a [b c]` | a starts, becomes the primary, and adds b and c; only the result is shown |
| `read a [2]`, `watch a` | a reads the entry as it is, or was at a revision; a watch yields the entry |
| `send a`, `answer a [unknown]` | the last swap of a reaches the directory; a learns its outcome, or none |
| `swap a` | `send a`, and `answer a` |
| `welcomed b`, `loaded b`, `executed b 7` | the primary accepts b; b has its snapshot; b has executed position 7 |
| `differs b`, `stream-lost b` | the state of b differs from the primary's; b loses its primary |
| `heard b [loading]` | b hears its primary now, which sends records, or not yet |
| `append a 7` | a has a record at position 7 |
| `join a b [snapshot]`, `ack a b 7`, `lost a b` | b connects to a, acknowledges a position (-1: none), is lost |
| `hand-over a [b]`, `hand-over-alone a b` | a hands over, to b alone |
| `tick a 1.5`, `pause a 60` | 1.5 s pass at a; a is paused for 60 s |
| `work a 5 [b:0.2/1] [c:repeats]` | for 5 s, a has a record per 10 ms while everything is confirmed, and its standbys \
acknowledge at once; b for 0.2 s of each second only, and c only repeats what it has acknowledged |
"""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Final

from kvpool.server.cluster import effects, events
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import (
    DirectoryRegressedError,
    MemberId,
    Seen,
    ShardRecord,
    SwapResult,
    VersionedRecord,
)
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.replica import Replica
from kvpool.server.cluster.standbys import NOTHING
from support.directory import member_of
from support.memory_directory import Store

_TICK_SECONDS: Final = 0.1
_ROUND_SECONDS: Final = 0.01
_EVENTS: Final[dict[str, Callable[..., events.Event]]] = {
    "welcomed": events.Welcomed,
    "loaded": events.SnapshotLoaded,
    "executed": lambda position: events.Executed(int(position)),
    "differs": events.StateDiffers,
    "stream-lost": events.StreamLost,
    "append": lambda position: events.Appended(int(position)),
    "join": lambda name, how="": events.StandbyConnected(member_of(name), resumes=how != "snapshot"),
    "ack": lambda name, position: events.Acknowledged(MemberId(name), int(position)),
    "lost": lambda name: events.StandbyLost(MemberId(name)),
    "hand-over": lambda name=None: events.HandOver(name),
    "hand-over-alone": lambda name: events.HandOver(name, is_alone=True),
}


class ReplicaTranscript:
    """The directory and the servers of a shard. Nothing happens without a command."""

    def __init__(self) -> None:
        self._store = Store()
        self._entries = {0: VersionedRecord(0, None)}  # by revision
        self._replicas: dict[str, Replica] = {}
        self._swaps: dict[str, effects.SendSwap] = {}  # the last one of each server
        self._outcomes: dict[str, SwapResult] = {}
        self._shown: dict[str, str] = {}  # the last line of each server
        self._seconds = 100.0
        self._ids = count()
        self._commands: dict[str, Callable[..., list[str]]] = {
            "write": self._write,
            "delete": self._delete,
            "send": self._send,
            "swap": lambda name: self._send(name) + self._happen("answer", name),
            "start": self._start,
            "lead": self._lead,
            "tick": self._tick,
            "pause": self._pause,
            "work": self._work,
        }

    def execute(self, command: str, *arguments: str) -> list[str]:
        """Executes a command; returns its output."""
        if command in self._commands:
            return self._commands[command](*arguments)
        return self._happen(command, *arguments)

    def _write(self, *options: str) -> list[str]:
        term, primary, in_sync = (option.partition("=")[2] for option in options)
        members = tuple(map(member_of, in_sync.split(",")))
        self._store.put(ShardRecord(int(term), MemberId(primary), members, self._new_id()))
        return self._remember()

    def _delete(self) -> list[str]:
        self._store.delete()
        return self._remember()

    def _send(self, name: str) -> list[str]:
        swap = self._swaps[name]
        outcome = self._outcomes[name] = self._store.swap(swap.revision, swap.record)
        self._remember()
        return [f"directory: {'won' if outcome.won else 'lost'}, {_entry(outcome.entry)}"]

    def _start(self, name: str, *settings: str) -> list[str]:
        values = {
            key.replace("-", "_"): int(value) for key, _, value in (each.partition("=") for each in settings) if value
        }
        seen = Seen(values.pop("known_term", 0), values.pop("known_revision", 0))
        config, has_state = ClusterConfig(**values), "without-state" not in settings  # type: ignore[arg-type]
        self._replicas[name] = Replica(member_of(name), config, has_state=has_state, seen=seen, new_id=self._new_id)
        return self._changed(name)

    def _lead(self, name: str, *standbys: str) -> list[str]:
        record = self._store.get().record
        self._start(name, f"known-term={record.term if record else 0}")
        self._happen("read", name)
        shown = self.execute("swap", name)
        for standby in standbys:
            self._happen("join", name, standby)
            self._happen("ack", name, standby, str(NOTHING))
            shown = self.execute("swap", name)
        return shown[-1:]

    def _tick(self, name: str, seconds: str) -> list[str]:
        lines = []
        for _ in range(round(float(seconds) / _TICK_SECONDS)):
            self._seconds += _TICK_SECONDS
            self._replicas[name].tick(self._seconds)
            lines += self._done(name)
        return [*lines, *self._changed(name)]

    def _pause(self, name: str, seconds: str) -> list[str]:
        self._seconds += float(seconds)
        self._replicas[name].tick(self._seconds)
        return [*self._done(name), *self._changed(name)]

    def _work(self, name: str, seconds: str, *standbys: str) -> list[str]:
        """Lets a primary work; its swaps win at once, and a standby whose connection it ends connects again."""
        replica, lines = self._replicas[name], list[str]()
        habits = {each.partition(":")[0]: each.partition(":")[2] for each in standbys}
        for round_number in range(1, round(float(seconds) / _ROUND_SECONDS) + 1):
            self._seconds += _ROUND_SECONDS
            if replica.confirmed == replica.last_position:
                replica.step(events.Appended(replica.last_position + 1))
            for standby in list(replica.standbys.connected.values()):
                if acknowledged := _acknowledged(habits.get(standby.member.member_id, ""), self._seconds):
                    newest = standby.acknowledged if acknowledged == "old" else replica.last_position
                    replica.step(events.Acknowledged(standby.member.member_id, newest))
            if round_number % round(_TICK_SECONDS / _ROUND_SECONDS) == 0:
                replica.tick(self._seconds)
            for line in self._done(name):
                lines.append(f"after {round_number * _ROUND_SECONDS:.2f} s: {line}")
                if line.startswith("sends at"):
                    lines += self.execute("swap", name)
                elif line.startswith("ends the connection of"):
                    replica.step(events.StandbyLost(MemberId(line[-1])))
                    replica.step(events.StandbyConnected(member_of(line[-1]), resumes=True))
        return [*lines, *self._changed(name)]

    def _happen(self, event: str, name: str, *words: str) -> list[str]:
        try:
            self._replicas[name].step(self._event(event, name, *words))
        except (DirectoryRegressedError, ValueError) as error:
            return [f"refused: {error}", *self._changed(name)]
        return [*self._done(name), *self._changed(name)]

    def _done(self, name: str) -> list[str]:
        """Carries out what is ready; returns a line for each effect."""
        ready = self._replicas[name].ready().effects
        self._replicas[name].advance()
        self._swaps.update((name, effect) for effect in ready if isinstance(effect, effects.SendSwap))
        return [_line(effect) for effect in ready]

    def _event(self, event: str, name: str, *words: str) -> events.Event:  # noqa: PLR0911 - a case per command
        match event, *words:
            case ("read",):
                return events.DirectoryRead(self._store.get())
            case "read", revision:
                return events.DirectoryRead(self._entries[int(revision)])
            case ("watch",):
                return events.DirectoryRead(self._store.entry)
            case ("answer",):
                return events.SwapEnded(self._outcomes[name])
            case "answer", "unknown":
                return events.SwapEnded(None)
            case "heard", *how:
                return events.PrimaryHeard(self._seconds, sends_records=not how)
        return _EVENTS[event](*words)

    def _changed(self, name: str) -> list[str]:
        before, state = self._shown.get(name), _state(self._replicas[name])
        self._shown[name] = state
        return [] if state == before else [state]

    def _new_id(self) -> str:
        return str(next(self._ids))

    def _remember(self) -> list[str]:
        entry = self._store.entry
        self._entries[entry.revision] = entry
        return [f"directory: {_entry(entry)}"]


def _line(effect: effects.Effect) -> str:  # noqa: C901, PLR0911 - a case per effect
    match effect:
        case effects.SendSwap(revision, record):
            return f"sends at revision {revision}: {_content(record)}"
        case effects.ReadDirectory():
            return "reads the directory"
        case effects.Follow(term, primary):
            return f"follows {primary.member_id} in term {term}"
        case effects.Leave():
            return "leaves its primary"
        case effects.Acknowledge(position):
            return f"acknowledges {position}"
        case effects.BecomePrimary(term, is_state_lost):
            return f"becomes the primary of term {term}{', the state is lost' if is_state_lost else ''}"
        case effects.BeDeposed(record):
            return f"is deposed: {_content(record)}"
        case effects.SendSnapshot(member_id):
            return f"sends the state to {member_id}"
        case effects.EndStandby(member_id):
            return f"ends the connection of {member_id}"
        case effects.ReportSilence():
            return "reports that its primary is silent"
        case effects.ReportLate(member_id):
            return f"reports that {member_id} is late"


def _acknowledged(habit: str, now_seconds: float) -> str:
    """What a standby acknowledges at a time: "new" positions, an "old" one, or nothing."""
    if habit == "repeats":
        return "old"
    runs_seconds, _, of_seconds = habit.partition("/")
    return "new" if not habit or now_seconds % float(of_seconds) < float(runs_seconds) else ""


def _entry(entry: VersionedRecord) -> str:
    return f"revision {entry.revision}: {_content(entry.record)}"


def _content(record: ShardRecord | None) -> str:
    if record is None:
        return "no record"
    return f"term {record.term}, primary {record.primary}, in sync {_names(each.member_id for each in record.in_sync)}"


def _state(replica: Replica) -> str:
    in_sync = _names(member.member_id for member in replica.in_sync)
    facts = [repr(replica)[len("<Replica ") : -1], f"revision {replica.entry.revision}, in sync {in_sync}"]
    if replica.role in {Role.PRIMARY, Role.DEPOSED}:
        facts.append(f"awaits {_names(sorted(replica.awaited))}")
        facts.append(f"confirmed {_position(replica.confirmed)} of {_position(replica.last_position)}")
        facts += [f"dismissed {_names(sorted(replica.dismissed))}"] if replica.dismissed else []
        facts += [f"hands over to {replica.successor}"] if replica.successor else []
    facts += [] if replica.has_state else ["without the state"]
    facts += [f"states lost: {replica.num_lost_states}"] if replica.num_lost_states else []
    return "; ".join(facts)


def _names(names: Iterable[MemberId]) -> str:
    return " ".join(names) or "none"


def _position(position: int) -> str:
    return "nothing" if position == NOTHING else str(position)
