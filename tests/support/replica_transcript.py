"""Transcripts of replicas: a command per event, followed by what the replica does, as in the tests of etcd's raft.

A command begins with `>`; the lines after it are its output, without those that did not change. `#` begins a comment.
Servers have names of one letter. `replay` returns a transcript with the output that replicas give now.

    # b has caught up, so a adds it.
    > ack a b 7
    sends at revision 1: term 1, primary a, in sync a b
    a: primary, term 1; revision 1, in sync a; awaits b; confirmed 7 of 9

| command | event |
|---|---|
| `write term=3 primary=a in-sync=a,b` | another server, or an operator, writes the record |
| `delete` | the shard is removed |
| `start a [without-state] [known-term=3] [claimed-term=4] [min-in-sync=2]` | a starts |
| `lead a [b c]` | a starts, becomes the primary, and adds b and c; only the result is shown |
| `read a [2]`, `watch a` | a reads the entry as it is, or was at a revision; a watch yields the entry |
| `send a`, `answer a [unknown]` | the last swap of a reaches the directory; a learns its outcome, or none |
| `swap a` | `send a`, and `answer a` |
| `followed b`, `loaded b`, `differs b` | the primary accepts b; b has its snapshot; the state of b differs from it |
| `stream-lost b` | b loses its primary |
| `append a 7` | a has a record at position 7 |
| `join a b [snapshot]`, `ack a b 7`, `lost a b` | b connects to a, acknowledges a position (-1: none), is lost |
| `dismiss a b`, `hand-over a [b]`, `hand-over-alone a b` | a removes b; a hands over, to b alone |
| `may-load a b` | asks whether b may load a snapshot |
"""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Final

from kvpool.server.cluster.directory import Entry, MemberId, ShardName, ShardRecord, Swap
from kvpool.server.cluster.replica import (
    NOTHING,
    BecomePrimary,
    BeDeposed,
    Effect,
    Follow,
    ReadDirectory,
    Replica,
    Role,
    SendSwap,
    WentBackError,
)
from support.directory import member_of
from support.memory_directory import Store

_SHARD: Final = ShardName("s")
_EVENTS: Final[dict[str, Callable[..., list[Effect] | None]]] = {
    "followed": lambda replica: replica.followed(),
    "loaded": lambda replica: replica.snapshot_loaded(),
    "differs": lambda replica: replica.state_lost(),
    "stream-lost": lambda replica: replica.stream_lost(),
    "append": lambda replica, position: replica.appended(int(position)),
    "join": lambda replica, name, how="": replica.follower_connected(member_of(name), resumes=how != "snapshot"),
    "ack": lambda replica, name, position: replica.acknowledged(name, int(position)),
    "lost": lambda replica, name: replica.follower_lost(name),
    "dismiss": lambda replica, name: replica.dismiss(name),
    "hand-over": lambda replica, name=None: replica.hand_over(name),
    "hand-over-alone": lambda replica, name: replica.hand_over(name, is_alone=True),
}


def replay(transcript: str) -> str:
    """Executes the commands of a transcript. Returns it with the output that they have."""
    shard, lines = _Shard(), []
    for line in transcript.splitlines():
        if line.startswith(">"):
            lines += [line, *shard.execute(*line[1:].split())]
        elif not line or line.startswith("#"):
            lines.append(line)
    return "\n".join(lines) + "\n"


class _Shard:
    """The directory and the servers of a shard. Nothing happens without a command."""

    def __init__(self) -> None:
        self._store = Store()
        self._entries = {0: Entry(0, None)}  # by revision
        self._replicas: dict[str, Replica] = {}
        self._swaps: dict[str, SendSwap] = {}  # the last one of each server
        self._outcomes: dict[str, Swap] = {}
        self._shown: dict[str, str] = {}  # the last line of each server
        self._ids = count()
        self._commands: dict[str, Callable[..., list[str]]] = {
            "write": self._write,
            "delete": self._delete,
            "send": self._send,
            "swap": lambda name: self._send(name) + self._happen("answer", name),
            "start": self._start,
            "lead": self._lead,
            "may-load": lambda name, other: ["yes" if self._replicas[name].may_load_snapshot(other) else "no"],
        }

    def execute(self, command: str, *arguments: str) -> list[str]:
        """Executes a command; returns its output."""
        if command in self._commands:
            return self._commands[command](*arguments)
        return self._happen(command, *arguments)

    def _write(self, *options: str) -> list[str]:
        term, primary, in_sync = (option.partition("=")[2] for option in options)
        members = tuple(map(member_of, in_sync.split(",")))
        self._store.put(_SHARD, ShardRecord(int(term), MemberId(primary), members, self._new_id()))
        return self._remember()

    def _delete(self) -> list[str]:
        self._store.delete(_SHARD, self._store.get(_SHARD).revision)
        return self._remember()

    def _send(self, name: str) -> list[str]:
        swap = self._swaps[name]
        outcome = self._outcomes[name] = self._store.swap(_SHARD, swap.revision, swap.record)
        self._remember()
        return [f"directory: {'won' if outcome.won else 'lost'}, {_entry(outcome.entry)}"]

    def _start(self, name: str, *settings: str) -> list[str]:
        named = [setting.replace("-", "_").partition("=") for setting in settings]
        has_state = "without-state" not in settings
        numbers = {"known_term": 0} | {name: int(value) for name, _, value in named if value}
        self._replicas[name] = Replica(member_of(name), has_state=has_state, new_id=self._new_id, **numbers)
        return self._changed(name)

    def _lead(self, name: str, *standbys: str) -> list[str]:
        record = self._store.get(_SHARD).record
        self._start(name, f"known-term={record.term if record else 0}")
        self._happen("read", name)
        shown = self.execute("swap", name)
        for standby in standbys:
            self._happen("join", name, standby)
            self._happen("ack", name, standby, str(NOTHING))
            shown = self.execute("swap", name)
        return shown[-1:]

    def _happen(self, event: str, name: str, *words: str) -> list[str]:
        try:
            effects = self._effects(event, name, *words) or []
        except (WentBackError, ValueError) as error:
            return [f"refused: {error}", *self._changed(name)]
        self._swaps.update((name, effect) for effect in effects if isinstance(effect, SendSwap))
        return [*map(_told, effects), *self._changed(name)]

    def _effects(self, event: str, name: str, *words: str) -> list[Effect] | None:
        replica = self._replicas[name]
        match event, *words:
            case ("read",):
                return replica.directory_read(self._store.get(_SHARD))
            case "read", revision:
                return replica.directory_read(self._entries[int(revision)])
            case ("watch",):
                return replica.directory_read(self._store.watched(_SHARD))
            case ("answer",):
                return replica.swap_ended(self._outcomes[name])
            case "answer", "unknown":
                return replica.swap_ended(None)
        return _EVENTS[event](replica, *words)

    def _changed(self, name: str) -> list[str]:
        before, state = self._shown.get(name), _state(self._replicas[name])
        self._shown[name] = state
        return [] if state == before else [state]

    def _new_id(self) -> str:
        return str(next(self._ids))

    def _remember(self) -> list[str]:
        entry = self._store.watched(_SHARD)
        self._entries[entry.revision] = entry
        return [f"directory: {_entry(entry)}"]


def _told(effect: Effect) -> str:
    match effect:
        case SendSwap(revision, record):
            return f"sends at revision {revision}: {_content(record)}"
        case ReadDirectory():
            return "reads the directory"
        case Follow(term, primary):
            return f"follows {primary.member_id} in term {term}"
        case BecomePrimary(term, is_state_lost):
            return f"becomes the primary of term {term}{', the state is lost' if is_state_lost else ''}"
        case BeDeposed(record):
            return f"is deposed: {_content(record)}"


def _entry(entry: Entry) -> str:
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
    else:
        facts.append("acknowledges" if replica.may_acknowledge else "acknowledges nothing")
    facts += [] if replica.has_state else ["without the state"]
    facts += [f"states lost: {replica.num_lost_states}"] if replica.num_lost_states else []
    return "; ".join(facts)


def _names(names: Iterable[MemberId]) -> str:
    return " ".join(names) or "none"


def _position(position: int) -> str:
    return "nothing" if position == NOTHING else str(position)
