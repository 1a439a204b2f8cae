"""Tests of cluster/replication_client.py against a primary that the test plays; they cite its rules."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvpool.core.commands import Command
from kvpool.core.errors import WrongStateError
from kvpool.server.cluster import events
from kvpool.server.cluster.directory import Member, ShardRecord, VersionedRecord
from kvpool.server.cluster.messages import Hello, Welcome, acknowledged_position, hello, read_hello, welcome
from kvpool.server.cluster.replication_client import PrimaryStream
from kvpool.server.cluster.standbys import NOTHING
from kvpool.server.journal.frames import FrameKind, encode_frame
from kvpool.server.journal.snapshot import snapshot_frames
from kvpool.wire import link
from kvpool.wire.errors import to_status
from kvpool.wire.frames import HEAD, FrameReader
from kvpool.wire.frames import encode_frame as link_frame
from support.core import World
from support.directory import member_of
from support.journal import Recorder, kill
from support.memory_directory import Store
from support.replicas import ReplicaServer, damage, encoded, until
from support.state import DrivenState

PRIMARY = member_of("primary")
MARK = link_frame(link.Kind.ANSWER, b"")


def answer(kind: FrameKind, payload: bytes) -> bytes:
    return link_frame(link.Kind.ANSWER, encode_frame(kind, payload))


class FakeTransport(asyncio.Transport):
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False
        self._written = FrameReader(link.server_state(64))
        self.frames: list[tuple[int, bytes]] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_aborted
        self.frames += self._written.feed(bytes(data))

    def abort(self) -> None:
        self.is_aborted = True


class Primary:
    """A primary with a state, whose commands are recorded."""

    def __init__(self) -> None:
        self.state = DrivenState()
        self._recorder = Recorder(self.state)
        self.world = World(allocator=self.state)
        self.session = self.world.open()
        self._number = 0
        self._recorder.records.clear()

    def snapshot(self) -> bytes:
        with self.state.snapshot() as snapshot:
            return b"".join(link_frame(link.Kind.ANSWER, frame) for frame in snapshot_frames(snapshot))

    def record(self) -> bytes:
        """Changes the state; returns the answer with the record."""
        self._number += 1
        self.world.admit(self.session, self._number, "abc"[: self._number % 4], 9)
        return answer(FrameKind.RECORD, self._recorder.records.pop())


class StandbyWorld:
    """A standby, and its connection."""

    def __init__(self, folder: Path) -> None:
        self.server = ReplicaServer(folder, Store())
        self.state, self.journal, self.member = self.server.state, self.server.journal, self.server.shard
        self.client = self.member.client
        self.written: list[bytes] = []
        self.events: list[events.Event] = []
        self.num_halfway = 0
        self._step = self.member.step
        self.member.step = self._record  # type: ignore[method-assign]
        self.journal.write = self._write  # type: ignore[method-assign]
        self.client.recorder.crash_after_bug = self._fail  # type: ignore[method-assign]
        self.server.directory.is_up = False
        self.client._followed = 3, PRIMARY  # the test connects
        self.member.step(events.DirectoryRead(VersionedRecord(1, ShardRecord(3, PRIMARY.member_id, (PRIMARY,), "x"))))
        self.connect()

    def connect(self) -> None:
        self.stream = self.client._stream = PrimaryStream(self.client, 3, hello("token", self.client.hello(3)))
        self.transport = FakeTransport()
        self.stream.connection_made(self.transport)

    async def load(self, primary: Primary, position: int = 6) -> None:
        self.stream.data_received(welcome(Welcome(position, resumes=False, now_seconds=7.0)) + primary.snapshot())
        await until(lambda: self.stream.is_following)
        self.journal.is_behind = False

    def count(self, kind: type[events.Event]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    @property
    def acknowledged(self) -> list[int]:
        return [acknowledged_position(payload) for _, payload in self.transport.frames[1:]]

    @property
    def hello(self) -> Hello:
        return read_hello(self.transport.frames[0][1])[1]

    def _record(self, event: events.Event) -> None:
        self.events.append(event)
        self._step(event)

    def _write(self, frame: bytes, command: Command[Any]) -> None:
        del command
        self.written.append(frame)

    def _fail(self, method: str) -> NoReturn:
        del method
        self.num_halfway += 1
        raise SystemExit


@pytest.fixture(name="world")
async def fixture_world(tmp_path: Path) -> AsyncIterator[StandbyWorld]:
    world = StandbyWorld(tmp_path / "standby")
    yield world
    await world.member.stop()
    kill(world.journal)


@pytest.fixture(name="primary")
async def fixture_primary(world: StandbyWorld) -> Primary:
    """A primary that the standby follows, with its state."""
    primary = Primary()
    await world.load(primary)
    return primary


async def test_the_first_message_says_who_follows_and_what_it_has(world: StandbyWorld) -> None:
    assert (world.hello.shard, world.hello.member, world.hello.term) == ("test", world.member.me, 3)
    assert (world.hello.resumed_term, world.hello.resumed_position) == (0, NOTHING)
    await world.load(Primary())
    world.stream.data_received(MARK)
    world.connect()
    assert (world.hello.resumed_term, world.hello.resumed_position) == (3, 7)


async def test_a_snapshot_is_acknowledged_when_it_is_loaded_and_in_the_journal_and_not_before(
    world: StandbyWorld,
) -> None:
    loaded: list[list[int]] = []

    class SlowState(DrivenState):
        def restore(self, snapshot: Any) -> None:
            loaded.append(world.acknowledged)
            super().restore(snapshot)

    world.member.state._make_state, primary = SlowState, Primary()
    world.stream.data_received(welcome(Welcome(6, resumes=False, now_seconds=7.0)))
    assert not world.acknowledged
    world.stream.data_received(primary.snapshot())
    assert not world.acknowledged
    assert not world.stream.is_following
    await until(lambda: world.stream.is_following)
    assert loaded == [[]]
    world.stream.data_received(MARK)
    assert not world.acknowledged, "the journal does not have it yet"
    world.journal.is_behind = False
    world.stream.data_received(MARK)
    assert world.acknowledged == [8]
    assert encoded(world.state) == encoded(primary.state)
    assert world.member.replica.has_state


@pytest.mark.parametrize("num_early", [0, 1, 2, 3])
async def test_frames_after_a_snapshot_are_executed_after_it(world: StandbyWorld, num_early: int) -> None:
    """Some arrive together with its end, the others while it is loaded."""
    primary = Primary()
    snapshot = welcome(Welcome(6, resumes=False, now_seconds=7.0)) + primary.snapshot()
    later = [primary.record(), MARK, primary.record()]
    joined = b"".join(later[:num_early])
    half = len(joined) // 2
    world.stream.data_received(snapshot + joined[:half])
    world.stream.data_received(joined[half:])
    for frame in later[num_early:]:
        world.stream.data_received(frame)
    await until(lambda: world.client.position == 9)
    assert encoded(world.state) == encoded(primary.state)
    assert world.written == [later[0][HEAD.size :], later[2][HEAD.size :]], "the frames that were received"
    assert not world.acknowledged
    assert not world.transport.is_aborted


async def test_a_record_is_executed_and_written_before_it_is_acknowledged(
    world: StandbyWorld, primary: Primary
) -> None:
    for number in range(1, 6):
        world.stream.data_received(primary.record())
        assert encoded(world.state) == encoded(primary.state)
        assert len(world.written) == number
        assert world.acknowledged[-1] == 6 + number


async def test_a_standby_that_resumes_acknowledges_what_it_has(world: StandbyWorld, primary: Primary) -> None:
    missed = primary.record() + primary.record()
    world.connect()
    world.stream.data_received(welcome(Welcome(6, resumes=True, now_seconds=7.0)) + missed)
    assert world.acknowledged == [8]
    assert encoded(world.state) == encoded(primary.state)


async def test_nothing_is_acknowledged_after_a_takeover_was_sent(world: StandbyWorld, primary: Primary) -> None:
    """I4 of the replica."""
    record = ShardRecord(3, PRIMARY.member_id, (world.member.me, PRIMARY), "x")
    world.member.step(events.DirectoryRead(VersionedRecord(2, record)))
    world.member.step(events.StreamLost())
    world.stream.data_received(primary.record())
    assert not world.acknowledged


async def test_nothing_is_executed_after_the_connection_was_left(world: StandbyWorld, primary: Primary) -> None:
    before = encoded(world.state)
    world.client.leave()
    world.stream.data_received(primary.record())
    assert not world.acknowledged
    assert encoded(world.state) == before
    world.stream.connection_lost(None)
    assert not world.count(events.StreamLost), "it was left on purpose"


async def test_a_snapshot_is_not_used_after_the_connection_was_left(world: StandbyWorld) -> None:
    primary = Primary()
    before = encoded(world.state)
    world.stream.data_received(welcome(Welcome(6, resumes=False, now_seconds=7.0)) + primary.snapshot())
    loading = world.stream._loading
    assert loading
    world.client.leave()
    world.stream.connection_lost(None)
    await asyncio.gather(loading, return_exceptions=True)
    assert encoded(world.state) == before
    assert not world.acknowledged
    assert world.client.resumed_term == 0


async def test_a_record_with_another_result_loses_the_state(
    world: StandbyWorld, primary: Primary, caplog: pytest.LogCaptureFixture
) -> None:
    """Rule 3."""
    damage(world.state)
    world.stream.data_received(primary.record() + primary.record())
    assert world.count(events.StateDiffers) == 1
    assert not world.acknowledged
    assert not world.written
    assert world.transport.is_aborted
    assert world.client.hello(3).resumed_term == 0, "it needs a snapshot"
    assert [record.levelno for record in caplog.records if "differs" in record.msg] == [logging.CRITICAL]


async def test_a_record_that_is_refused_loses_the_state(world: StandbyWorld, primary: Primary) -> None:
    world.state.close_session(primary.session.session_id, 0.0)
    world.stream.data_received(primary.record())
    assert world.count(events.StateDiffers) == 1


async def test_a_record_that_is_executed_in_part_ends_the_process(
    world: StandbyWorld, primary: Primary, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stream.data_received(primary.record())

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("kvpool.server.cluster.replicated_state.execute_record", fail)
    with pytest.raises(SystemExit):
        world.stream.data_received(primary.record())
    assert (world.num_halfway, world.count(events.StateDiffers), world.acknowledged) == (1, 0, [7])


@pytest.mark.parametrize(
    ("error", "bug"), [(MemoryError(), "load_snapshot"), (LookupError("parts do not belong together"), None)], ids=repr
)
async def test_a_snapshot_that_cannot_be_loaded_for_any_reason_ends_the_connection(
    world: StandbyWorld, caplog: pytest.LogCaptureFixture, error: Exception, bug: str | None
) -> None:
    class Strict(DrivenState):
        def restore(self, snapshot: Any) -> None:
            super().restore(snapshot)
            raise error

    world.member.state._make_state = Strict
    before = encoded(world.state)
    world.stream.data_received(WELCOME + Primary().snapshot())
    await until(lambda: world.transport.is_aborted)
    assert encoded(world.state) == before
    assert not world.num_halfway
    assert not world.acknowledged
    assert [record.__dict__.get("method") for record in caplog.records] == [bug]


@pytest.mark.parametrize("address", [f"{'a' * 64}.svc:1", "host:99999", "127.0.0.1:1"])
async def test_a_primary_that_cannot_be_reached_is_tried_again(
    world: StandbyWorld, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    world.client.leave()
    unreachable = replace(PRIMARY, replication_address=address)
    for attempt in (1, 2):
        world.client.follow(4, unreachable)
        await until(lambda: world.count(events.StreamLost) == attempt)  # noqa: B023 - it ends within the round
    assert caplog.messages.count("primary not reached") == 1


WELCOME = welcome(Welcome(6, resumes=False, now_seconds=7.0))
RESUMES = welcome(Welcome(6, resumes=True, now_seconds=7.0))
WRONG = {
    "garbage": b"\0" * 200,
    "no welcome": MARK,
    "a malformed welcome": link_frame(link.Kind.WELCOME, b"\x80"),
    "a record without a state": WELCOME + answer(FrameKind.RECORD, b""),
    "a mark within a snapshot": WELCOME + answer(FrameKind.SNAPSHOT, b"") + MARK,
    "a snapshot of a standby that resumes": RESUMES + answer(FrameKind.SNAPSHOT, b""),
    "an empty snapshot": WELCOME + answer(FrameKind.END, b""),
    "a damaged frame": RESUMES + link_frame(link.Kind.ANSWER, bytes(40)),
    "a malformed record": RESUMES + answer(FrameKind.RECORD, b"\x80"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_stream_that_is_not_understood_is_left(world: StandbyWorld, name: str) -> None:
    before = encoded(world.state)
    world.stream.data_received(WRONG[name])
    await until(lambda: world.transport.is_aborted)
    world.stream.connection_lost(None)
    assert world.count(events.StreamLost) == 1
    assert encoded(world.state) == before
    assert not world.written
    assert not world.count(events.StateDiffers)
    assert set(world.acknowledged) <= {6}


async def test_a_refusal_ends_the_connection(world: StandbyWorld, caplog: pytest.LogCaptureFixture) -> None:
    refused = to_status(WrongStateError("OTHER_SHARD", "this server belongs to another shard"))
    world.stream.data_received(link_frame(link.Kind.REFUSED, refused.SerializeToString()))
    assert world.transport.is_aborted
    assert [record.__dict__["reason"] for record in caplog.records] == ["OTHER_SHARD"]
    world.stream.connection_lost(None)
    assert world.count(events.StreamLost) == 1


async def test_a_primary_is_heard_with_each_byte(world: StandbyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from silence: transcripts/silence.txt."""
    now_seconds = world.stream.heard_seconds
    monkeypatch.setattr("time.monotonic", lambda: now_seconds)
    assert world.client.heard == events.PrimaryHeard(now_seconds, sends_records=False)
    now_seconds += 0.5
    world.stream.data_received(RESUMES[:5])
    assert world.client.heard == events.PrimaryHeard(now_seconds, sends_records=False)
    world.stream.data_received(RESUMES[5:])
    assert world.client.heard == events.PrimaryHeard(now_seconds, sends_records=True)
    world.client.leave()
    assert world.client.heard.seconds is None


async def test_a_primary_that_is_followed_is_not_followed_twice(world: StandbyWorld) -> None:
    world.client.leave()
    connected = 0

    def connection() -> asyncio.Protocol:
        nonlocal connected
        connected += 1
        return asyncio.Protocol()

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    primary = Member(PRIMARY.member_id, (), f"127.0.0.1:{port}")
    for _ in range(3):
        world.client.follow(3, primary)
    await until(lambda: connected)
    world.client.follow(3, primary)
    assert world.client._task
    await world.client._task
    world.client.follow(4, primary)
    await until(lambda: connected == 2)
    world.client.leave()
    server.close()
