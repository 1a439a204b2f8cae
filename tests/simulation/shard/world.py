"""Servers of one shard whose state is a list of epochs. A random scheduler decides what happens next.

Messages of a stream arrive in order, after any delay, or not at all. Servers are killed with or without their journal,
suspect each other for no reason, hand over, and dismiss followers. Clients write, read, and check the answers:

- What a client wrote and was answered is in the state of every later primary, in order, unless every member that had
  it lost it (I2, I3, I5, I6).
- A read returns everything that was answered before it arrived (I7).
- Each term has one primary (I1).
- No epoch is given out twice, also not one whose answer never left: ranks may have seen it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvpool.server.cluster.directory import Entry, Member, MemberId
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
)
from kvpool.server.cluster.shard import EPOCHS_PER_TERM
from simulation.shard.memory_directory import MemoryDirectory

Frame = int | None
"""A written epoch, or a mark."""


class BrokenPromiseError(AssertionError):
    """A promise of the protocol was broken."""


@dataclass(eq=False)
class Stream:
    """A stream of a follower to a primary. Each side learns of its end on its own."""

    follower: "Server"
    primary: "Server"
    term: int
    down: deque[tuple[str, object]] = field(default_factory=deque)
    up: deque[int] = field(default_factory=deque)
    is_accepted: bool = False
    needs_snapshot: bool = False
    is_live: bool = False  # gets each new frame
    follower_open: bool = True
    primary_open: bool = True
    position: int = NOTHING  # of the follower, in the primary's term


@dataclass(eq=False)
class Waiting:
    """A call whose answer waits at the gate."""

    position: int
    seen: list[int]
    answered_before: int
    num_losses: int
    epoch: int | None = None  # of a write


class Server:
    """A process with a replica, and what the real server does around it."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.member = Member(MemberId(name), (f"{name}:1",), f"{name}:2")
        self.state: list[int] = []
        self.has_journal = False
        self.known_term = 0
        self.is_up = False
        self.start()

    def start(self) -> None:
        if not self.has_journal:
            self.state = []
        self.replica = self.world.make_replica(self.member, has_state=self.has_journal, known_term=self.known_term)
        self.is_up, self.has_journal = True, True
        self.frames: list[Frame] = []
        self.term_position: tuple[int, int] | None = None  # term and position of what was followed last
        self.stream: Stream | None = None
        self.waiting: list[Waiting] = []
        self.todo: list[Effect] = [ReadDirectory()]

    def kill(self, *, keeps_journal: bool) -> None:
        self.is_up = False
        self.has_journal = keeps_journal and self.replica.has_state
        self.known_term = self.replica.known_term
        if self.stream:
            self.stream.follower_open = False
        for stream in self.world.streams:
            if stream.primary is self:
                stream.primary_open = False
        self.waiting.clear()

    # Effects

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendSwap() if self.replica.role is not Role.PRIMARY:
                    if not self.world.acknowledges_too_long:
                        self.leave_stream()
                    self.todo.append(effect)
                case SendSwap() | ReadDirectory() | Follow():
                    self.todo.append(effect)
                case BecomePrimary(term, is_state_lost):
                    if not self.world.acknowledges_too_long:
                        self.leave_stream()
                    self.todo.clear()
                    if is_state_lost:
                        self.state = []
                    self.frames = []
                    self.world.check_primary(self, term, is_state_lost=is_state_lost)
                    self.replica.appended(NOTHING)
                case BeDeposed():
                    self.kill(keeps_journal=False)

    def do_next(self) -> None:
        """Carries out one effect that needs the directory or another server."""
        if not self.todo:
            return
        effect = self.todo.pop(0)
        directory = self.world.directory
        match effect:
            case SendSwap(revision, record):
                self.carry_out(self.replica.swap_ended(directory.compare_and_swap(revision, record)))
            case ReadDirectory():
                entry = directory.get()
                if entry is None:
                    self.todo.append(effect)
                else:
                    self.watched(entry)
            case Follow(term, primary):
                self.follow(term, primary.member_id)

    def watched(self, entry: Entry) -> None:
        self.carry_out(self.replica.directory_read(entry))

    def leave_stream(self) -> None:
        if self.stream:
            self.stream.follower_open = False
            self.stream = None

    def follow(self, term: int, primary_id: MemberId) -> None:
        if self.replica.role is not Role.STANDBY:
            return
        primary = self.world.servers[primary_id]
        if self.stream and (self.stream.primary, self.stream.term) == (primary, term):
            return
        self.leave_stream()
        if not primary.is_up or primary.replica.role is not Role.PRIMARY or primary.replica.known_term != term:
            self.lose_stream()
            return
        self.stream = Stream(self, primary, term)
        self.world.streams.append(self.stream)

    def lose_stream(self) -> None:
        self.leave_stream()
        if self.replica.role is Role.STANDBY:
            effects = self.replica.stream_lost()
            self.carry_out(effects)

    # The primary

    def accept(self, stream: Stream) -> None:
        follower = stream.follower
        stream.is_accepted = True
        resumes = follower.term_position is not None and follower.term_position[0] == stream.term
        for other in self.world.streams:
            if other is not stream and other.primary is self and other.follower is follower:
                other.primary_open = False
        if resumes and follower.term_position:
            stream.position = follower.term_position[1]
            stream.down.append(("welcome", None))
            stream.down.extend(("frame", frame) for frame in self.frames[stream.position + 1 :])
            stream.is_live = True
        else:
            stream.needs_snapshot = True
        self.carry_out(self.replica.follower_connected(follower.member, resumes=resumes))

    def send_snapshot(self, stream: Stream) -> None:
        if self.replica.may_load_snapshot(stream.follower.member.member_id):
            stream.needs_snapshot, stream.is_live = False, True
            stream.position = len(self.frames) - 1
            stream.down.append(("snapshot", list(self.state)))

    def append(self, frame: Frame) -> int:
        self.frames.append(frame)
        if frame is not None:
            self.state.append(frame)
        position = len(self.frames) - 1
        self.replica.appended(position)
        for stream in self.world.streams:
            if stream.primary is self and stream.primary_open and stream.is_live:
                stream.down.append(("frame", frame))
        return position

    def write(self) -> None:
        epoch = self.world.next_epoch(self)
        position = self.append(epoch)
        self.waiting.append(Waiting(position, list(self.state), len(self.world.answered), self.world.num_losses, epoch))

    def read(self) -> None:
        position = NOTHING if self.world.reads_unconfirmed else self.append(None)
        self.waiting.append(Waiting(position, list(self.state), len(self.world.answered), self.world.num_losses))

    def answer(self) -> None:
        confirmed = self.replica.confirmed
        for waiting in [each for each in self.waiting if each.position <= confirmed]:
            self.waiting.remove(waiting)
            self.world.check_answer(waiting)

    # The follower

    def receive(self, stream: Stream) -> None:
        kind, content = stream.down.popleft()
        if stream is not self.stream:
            return
        match kind:
            case "welcome":
                self.replica.followed()
            case "snapshot":
                self.state = list(content)  # type: ignore[call-overload]
                self.term_position = stream.term, stream.position
                self.replica.followed()
                self.replica.snapshot_loaded()
                self.acknowledge(stream)
            case "frame":
                if content is not None and self.replica.role is not Role.PRIMARY:
                    self.state.append(content)  # type: ignore[arg-type]
                stream.position += 1
                self.term_position = stream.term, stream.position
                self.acknowledge(stream)

    def acknowledge(self, stream: Stream) -> None:
        if self.replica.may_acknowledge or self.world.acknowledges_too_long:
            stream.up.append(stream.position)


class World:
    """All servers of the shard, and the clients. Tests break the protocol with subclasses, which must be noticed.

    Args:
        seed: Seed of the schedule.
        num_servers: Number of servers.

    Attributes:
        new_replica: Makes replicas.
        acknowledges_too_long: Whether followers acknowledge after they sent their takeover.
        reads_unconfirmed: Whether a read is answered without a confirmation.
        epochs_ignore_the_term: Whether a primary continues with the epochs of its state alone.
    """

    new_replica = Replica
    acknowledges_too_long = False
    reads_unconfirmed = False
    epochs_ignore_the_term = False

    def __init__(self, seed: int, num_servers: int) -> None:
        self.random = Random(seed)  # noqa: S311 - a schedule is drawn again from its seed
        self.directory = MemoryDirectory(self.random)
        self.streams: list[Stream] = []
        self.answered: list[int] = []
        self.num_losses = 0
        self.primaries: dict[int, MemberId] = {}
        self.num_takeovers = 0
        self._epochs: set[int] = set()
        self._change = 0
        self.servers: dict[MemberId, Server] = {}
        for name in "abc"[:num_servers]:
            self.servers[MemberId(name)] = Server(self, name)

    def make_replica(self, member: Member, *, has_state: bool, known_term: int) -> Replica:
        return self.new_replica(member, has_state=has_state, known_term=known_term, new_id=self._new_id)

    def _new_id(self) -> str:
        self._change += 1
        return f"c{self._change}"

    def next_epoch(self, server: Server) -> int:
        past = 0 if self.epochs_ignore_the_term else server.replica.known_term * EPOCHS_PER_TERM
        epoch = max(past, server.state[-1] if server.state else 0) + 1
        if epoch in self._epochs:
            raise BrokenPromiseError(f"epoch {epoch} was given out twice")
        self._epochs.add(epoch)
        return epoch

    # What happens

    def run(self, num_steps: int) -> None:
        happenings: list[tuple[float, Callable[[], None]]] = [
            (6, self._do_next),
            (12, self._deliver),
            (6, self._write),
            (3, self._read),
            (2, self._watch),
            (0.5, self._suspect),
            (0.3, self._kill),
            (0.6, self._start),
            (0.3, self._hand_over),
            (0.6, self._dismiss),
            (0.3, self.directory.apply_late),
            (0.1, self._toggle_directory),
        ]
        weights = [weight for weight, _ in happenings]
        for _, happen in self.random.choices(happenings, weights, k=num_steps):
            happen()

    def _up(self) -> list[Server]:
        return [server for server in self.servers.values() if server.is_up]

    def _one(self, servers: list[Server]) -> Server | None:
        return self.random.choice(servers) if servers else None

    def _primaries(self) -> list[Server]:
        return [server for server in self._up() if server.replica.role is Role.PRIMARY]

    def _do_next(self) -> None:
        if server := self._one(self._up()):
            server.do_next()

    def _write(self) -> None:
        if server := self._one(self._primaries()):
            server.write()

    def _read(self) -> None:
        if server := self._one(self._primaries()):
            server.read()

    def _watch(self) -> None:
        if self.directory.is_up and (server := self._one(self._up())):
            server.watched(self.directory.entry)

    def _kill(self) -> None:
        if server := self._one(self._up()):
            server.kill(keeps_journal=self.random.random() < 0.7)

    def _start(self) -> None:
        if server := self._one([server for server in self.servers.values() if not server.is_up]):
            server.start()

    def _hand_over(self) -> None:
        server = self._one(self._primaries())
        others = [member for member in server.replica.in_sync if member is not server.member] if server else []
        if server and others:
            successor = self.random.choice(others).member_id
            server.carry_out(server.replica.hand_over(successor, is_alone=self.random.random() < 0.3))

    def _dismiss(self) -> None:
        """A primary dismisses a follower, or ends the connection of one that it has dismissed."""
        server = self._one(self._primaries())
        streams = [stream for stream in self.streams if stream.primary is server and stream.primary_open]
        if server is None or not streams:
            return
        stream = self.random.choice(streams)
        member_id = stream.follower.member.member_id
        if member_id not in server.replica.dismissed:
            server.carry_out(server.replica.dismiss(member_id))
        else:
            self._primary_loses(stream)

    def _suspect(self) -> None:
        """A side of a stream suspects the other one, or finds it gone."""
        if self.streams:
            stream = self.random.choice(self.streams)
            if self.random.random() < 0.5:
                self._follower_loses(stream)
            else:
                self._primary_loses(stream)

    def _follower_loses(self, stream: Stream) -> None:
        if stream.follower_open and stream.follower.stream is stream:
            stream.follower.lose_stream()
        stream.follower_open = False
        self._forget(stream)

    def _primary_loses(self, stream: Stream) -> None:
        if stream.primary_open and stream.is_accepted and stream.primary.is_up:
            stream.primary_open = False
            effects = stream.primary.replica.follower_lost(stream.follower.member.member_id)
            stream.primary.carry_out(effects)
        stream.primary_open = False
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        if not stream.follower_open and not stream.primary_open and stream in self.streams:
            self.streams.remove(stream)

    def _toggle_directory(self) -> None:
        self.directory.is_up = not self.directory.is_up or self.random.random() < 0.3

    def _deliver(self) -> None:
        if not self.streams:
            return
        stream = self.random.choice(self.streams)
        primary, follower = stream.primary, stream.follower
        if not stream.is_accepted:
            if (
                primary.is_up
                and stream.primary_open
                and stream.follower_open
                and (primary.replica.role is Role.PRIMARY and primary.replica.known_term == stream.term)
            ):
                primary.accept(stream)
            else:
                self._follower_loses(stream)
        elif stream.needs_snapshot and stream.primary_open:
            primary.send_snapshot(stream)
        elif stream.down and follower.is_up and stream.follower_open and self.random.random() < 0.6:
            follower.receive(stream)
        elif stream.up and primary.is_up and stream.primary_open:
            position = stream.up.popleft()
            primary.carry_out(primary.replica.acknowledged(follower.member.member_id, position))
        elif not stream.primary_open:
            self._follower_loses(stream)
        elif not stream.follower_open:
            self._primary_loses(stream)
        for server in self._primaries():
            server.answer()

    # Checks

    def check_primary(self, server: Server, term: int, *, is_state_lost: bool) -> None:
        if self.primaries.setdefault(term, server.member.member_id) != server.member.member_id:
            raise BrokenPromiseError(f"I1: term {term} has two primaries")
        self.num_takeovers += 1
        if is_state_lost:
            self.answered = []
            self.num_losses += 1
        elif not _contains(server.state, self.answered):
            raise BrokenPromiseError(f"{server.member.member_id} became primary without what was answered")

    def check_answer(self, waiting: Waiting) -> None:
        if waiting.num_losses != self.num_losses:
            return  # a primary of before the loss lets out what was confirmed in time; the sessions learn of the loss
        if not _contains(waiting.seen, self.answered[: waiting.answered_before]):
            raise BrokenPromiseError("I7: an answer does not contain what was answered before its call")
        if waiting.epoch is not None:
            self.answered.append(waiting.epoch)


def _contains(state: list[int], answered: list[int]) -> bool:
    """Whether all answered epochs are in the state."""
    return set(answered) <= set(state)
