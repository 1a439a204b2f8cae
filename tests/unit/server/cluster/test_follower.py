"""Tests of cluster/follower.py against a primary that the test plays; they cite its rules."""

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.commands import Command
from kvpool.core.state import State
from kvpool.server.cluster.directory import Entry, Member, ShardRecord
from kvpool.server.cluster.follower import STALL_SECONDS, Follower, _PrimaryLink
from kvpool.server.cluster.messages import Refused, Welcome, acknowledged_position, hello_of, to_frame
from kvpool.server.cluster.replica import NOTHING, Effect, Replica
from kvpool.server.journal.frames import Frame, FrameKind, FrameParser, encode_frame
from kvpool.server.journal.snapshot import snapshot_frames
from support.core import World
from support.directory import member_of
from support.journal import Recorder
from support.replicas import damage, encoded, until
from support.server import free_port
from support.state import DrivenState

ME, PRIMARY = member_of("me"), member_of("primary")
MARK = encode_frame(FrameKind.MARK, b"")


class FakeTransport(asyncio.Transport):
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False
        self._written = FrameParser()
        self.frames: list[Frame] = []

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
            return b"".join(snapshot_frames(snapshot))

    def record(self) -> bytes:
        """Changes the state; returns the frame of the record."""
        self._number += 1
        self.world.admit(self.session, self._number, "abc"[: self._number % 4], 9)
        return encode_frame(FrameKind.RECORD, self._recorder.records.pop())


class FollowerJournal:
    """Counts what it is asked to keep."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.num_restarts = 0
        self.is_behind = False

    def write(self, frame: bytes, _: Command[Any]) -> None:
        self.written.append(frame)

    def restart(self) -> None:
        self.num_restarts += 1
        self.is_behind = True


class FollowerWorld:
    """A follower that is a standby, and its connection."""

    def __init__(self, *, make_state: Callable[[], State] = DrivenState) -> None:
        self.replica = Replica(ME, has_state=True, known_term=0, new_id=lambda: "id")
        self.replica.directory_read(Entry(1, ShardRecord(3, PRIMARY.member_id, (PRIMARY,), "x")))
        self.state = DrivenState()
        self.journal = FollowerJournal()
        self.lost: list[list[Effect]] = []
        self.num_state_lost = 0
        self.num_halfway = 0
        self.now_seconds = 100.0
        self.follower = Follower(
            self.replica,
            self.state,
            make_state,
            self.journal,
            ME,
            shard="c/main",
            token=lambda: "secret",
            tls=None,
            lost=self._lost,
            state_lost=self._state_lost,
            failed_halfway=self._failed_halfway,
            now_seconds=lambda: self.now_seconds,
        )
        self.connect()

    def connect(self) -> None:
        self.link = self.follower._link = _PrimaryLink(self.follower, 3, to_frame(self.follower.hello(3)))
        self.transport = FakeTransport()
        self.link.connection_made(self.transport)

    async def load(self, primary: Primary, position: int = 6) -> None:
        self.link.data_received(to_frame(Welcome(position, resumes=False, now_seconds=7.0)) + primary.snapshot())
        await until(lambda: self.link.is_following)
        self.journal.is_behind = False

    @property
    def acknowledged(self) -> list[int]:
        kinds = [frame.kind for frame in self.transport.frames]
        assert kinds == [FrameKind.HELLO] + [FrameKind.ACKNOWLEDGED] * (len(kinds) - 1)
        return [acknowledged_position(frame.payload) for frame in self.transport.frames[1:]]

    def _lost(self) -> None:
        self.lost.append(self.replica.stream_lost())

    def _state_lost(self) -> None:
        self.num_state_lost += 1

    def _failed_halfway(self) -> None:
        assert isinstance(sys.exception(), MemoryError)
        self.num_halfway += 1


async def test_the_first_message_says_who_follows_and_what_it_has() -> None:
    world = FollowerWorld()
    hello = hello_of(world.transport.frames[0].payload)
    assert (hello.shard, hello.token, hello.member, hello.term) == ("c/main", "secret", ME, 3)
    assert (hello.resumed_term, hello.resumed_position) == (0, NOTHING)
    await world.load(Primary())
    world.link.data_received(MARK)
    world.connect()
    hello = hello_of(world.transport.frames[0].payload)
    assert (hello.resumed_term, hello.resumed_position) == (3, 7)


async def test_a_snapshot_is_acknowledged_when_it_is_loaded_and_in_the_journal_and_not_before() -> None:
    loaded: list[list[int]] = []

    class SlowState(DrivenState):
        def restore(self, snapshot: Any) -> None:
            loaded.append(world.acknowledged)
            super().restore(snapshot)

    world, primary = FollowerWorld(make_state=SlowState), Primary()
    world.link.data_received(to_frame(Welcome(6, resumes=False, now_seconds=7.0)))
    assert not world.acknowledged
    world.link.data_received(primary.snapshot())
    assert not world.acknowledged
    assert not world.link.is_following
    await until(lambda: world.link.is_following)
    assert loaded == [[]]
    world.link.data_received(MARK)
    assert not world.acknowledged, "the journal does not have it yet"
    world.journal.is_behind = False
    world.link.data_received(MARK)
    assert world.acknowledged == [8]
    assert encoded(world.state) == encoded(primary.state)
    assert world.journal.num_restarts == 1
    assert world.replica.has_state


@pytest.mark.parametrize("num_early", [0, 1, 2, 3])
async def test_frames_after_a_snapshot_are_executed_after_it(num_early: int) -> None:
    """Some arrive together with its end, the others while it is loaded."""
    world, primary = FollowerWorld(), Primary()
    snapshot = to_frame(Welcome(6, resumes=False, now_seconds=7.0)) + primary.snapshot()
    later = [primary.record(), MARK, primary.record()]
    joined = b"".join(later[:num_early])
    half = len(joined) // 2
    world.link.data_received(snapshot + joined[:half])
    world.link.data_received(joined[half:])
    for frame in later[num_early:]:
        world.link.data_received(frame)
    await until(lambda: world.follower.position == 9)
    assert encoded(world.state) == encoded(primary.state)
    assert world.journal.written == [later[0], later[2]], "the frames that were received"
    assert not world.acknowledged
    assert not world.transport.is_aborted


async def test_a_record_is_executed_and_written_before_it_is_acknowledged() -> None:
    world, primary = FollowerWorld(), Primary()
    await world.load(primary)
    for number in range(1, 6):
        world.link.data_received(primary.record())
        assert encoded(world.state) == encoded(primary.state)
        assert len(world.journal.written) == number
        assert world.acknowledged[-1] == 6 + number


async def test_a_follower_that_resumes_acknowledges_what_it_has() -> None:
    world, primary = FollowerWorld(), Primary()
    await world.load(primary)
    missed = primary.record() + primary.record()
    world.connect()
    world.link.data_received(to_frame(Welcome(6, resumes=True, now_seconds=7.0)) + missed)
    assert world.acknowledged == [8]
    assert encoded(world.state) == encoded(primary.state)
    assert world.journal.num_restarts == 1


async def test_nothing_is_acknowledged_after_a_takeover_was_sent() -> None:
    """I4 of the replica."""
    world, primary = FollowerWorld(), Primary()
    await world.load(primary)
    world.replica.directory_read(Entry(2, ShardRecord(3, PRIMARY.member_id, (ME, PRIMARY), "x")))
    assert world.replica.stream_lost()
    world.link.data_received(primary.record())
    assert not world.acknowledged


async def test_nothing_is_executed_after_the_connection_was_left() -> None:
    world, primary = FollowerWorld(), Primary()
    await world.load(primary)
    before = encoded(world.state)
    world.follower.leave()
    world.link.data_received(primary.record())
    assert not world.acknowledged
    assert encoded(world.state) == before
    world.link.connection_lost(None)
    assert not world.lost, "it was left on purpose"


async def test_a_snapshot_is_not_used_after_the_connection_was_left() -> None:
    world, primary = FollowerWorld(), Primary()
    before = encoded(world.state)
    world.link.data_received(to_frame(Welcome(6, resumes=False, now_seconds=7.0)) + primary.snapshot())
    loading = world.link._loading
    assert loading
    world.follower.leave()
    world.link.connection_lost(None)
    await asyncio.gather(loading, return_exceptions=True)
    assert encoded(world.state) == before
    assert not world.acknowledged
    assert world.follower.resumed_term == 0


async def test_a_record_with_another_result_loses_the_state(caplog: pytest.LogCaptureFixture) -> None:
    """Rule 3."""
    world, primary = FollowerWorld(), Primary()
    await world.load(primary)
    damage(world.state)
    world.link.data_received(primary.record() + primary.record())
    assert world.num_state_lost == 1
    assert not world.acknowledged
    assert not world.journal.written
    assert world.transport.is_aborted
    assert world.follower.hello(3).resumed_term == 0, "it needs a snapshot"
    assert [record.levelno for record in caplog.records if "differs" in record.msg] == [logging.CRITICAL]


async def test_a_record_that_is_refused_loses_the_state() -> None:
    world, primary = FollowerWorld(), Primary()
    await world.load(primary)
    world.state.close_session(primary.session.session_id, 0.0)
    world.link.data_received(primary.record())
    assert world.num_state_lost == 1


async def test_a_record_that_is_executed_in_part_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    world, primary = FollowerWorld(), Primary()
    await world.load(primary)
    world.link.data_received(primary.record())

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("kvpool.server.cluster.follower.execute_record", fail)
    with pytest.raises(MemoryError):
        world.link.data_received(primary.record())
    assert (world.num_halfway, world.num_state_lost, world.acknowledged) == (1, 0, [7])


async def test_a_snapshot_that_cannot_be_loaded_for_any_reason_ends_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> State:
        raise MemoryError

    world = FollowerWorld(make_state=fail)
    before = encoded(world.state)
    world.link.data_received(WELCOME + Primary().snapshot())
    await until(lambda: world.transport.is_aborted)
    assert encoded(world.state) == before
    assert not world.num_halfway
    assert [record.__dict__["method"] for record in caplog.records] == ["load_snapshot"]


@pytest.mark.parametrize("address", [f"{'a' * 64}.svc:1", "host:99999", "127.0.0.1:1"])
async def test_a_primary_that_cannot_be_reached_is_tried_again(caplog: pytest.LogCaptureFixture, address: str) -> None:
    world = FollowerWorld()
    world.follower.leave()
    unreachable = replace(PRIMARY, replication_address=address)
    for attempt in (1, 2):
        world.follower.follow(4, unreachable)
        await until(lambda: len(world.lost) == attempt)  # noqa: B023 - it ends within the round
    assert [record.message for record in caplog.records] == ["primary not reached"]


WELCOME = to_frame(Welcome(6, resumes=False, now_seconds=7.0))
RESUMES = to_frame(Welcome(6, resumes=True, now_seconds=7.0))
WRONG = {
    "garbage": b"\0" * 200,
    "no welcome": MARK,
    "a malformed welcome": encode_frame(FrameKind.WELCOME, b"\x80"),
    "two welcomes": WELCOME + WELCOME,
    "a record without a state": WELCOME + encode_frame(FrameKind.RECORD, b""),
    "a mark within a snapshot": WELCOME + encode_frame(FrameKind.SNAPSHOT, b"") + MARK,
    "a snapshot of a follower that resumes": RESUMES + encode_frame(FrameKind.SNAPSHOT, b""),
    "an empty snapshot": WELCOME + encode_frame(FrameKind.END, b""),
    "a malformed record": RESUMES + encode_frame(FrameKind.RECORD, b"\x80"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_stream_that_is_not_understood_is_left(name: str) -> None:
    world = FollowerWorld()
    before = encoded(world.state)
    world.link.data_received(WRONG[name])
    await until(lambda: world.transport.is_aborted)
    world.link.connection_lost(None)
    assert len(world.lost) == 1
    assert encoded(world.state) == before
    assert not world.journal.written
    assert not world.num_state_lost
    assert set(world.acknowledged) <= {6}


async def test_a_snapshot_of_an_impossible_state_is_left() -> None:
    class Strict(DrivenState):
        def restore(self, snapshot: Any) -> None:
            super().restore(snapshot)
            raise LookupError("parts do not belong together")

    world = FollowerWorld(make_state=Strict)
    before = encoded(world.state)
    world.link.data_received(WELCOME + Primary().snapshot())
    await until(lambda: world.transport.is_aborted)
    assert encoded(world.state) == before
    assert not world.acknowledged


async def test_a_refusal_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    world = FollowerWorld()
    world.link.data_received(to_frame(Refused("OTHER_SHARD", "this server belongs to another shard")))
    assert world.transport.is_aborted
    assert [record.__dict__["reason"] for record in caplog.records] == ["OTHER_SHARD"]
    world.link.connection_lost(None)
    assert len(world.lost) == 1


async def test_the_silence_of_a_primary_counts_sooner_once_it_sends_records() -> None:
    world = FollowerWorld()
    world.now_seconds += STALL_SECONDS
    assert not world.follower.is_primary_silent(0.5)
    world.now_seconds += 0.1
    assert world.follower.is_primary_silent(0.5), "a process that is stopped has its connections accepted by its kernel"
    await world.load(Primary())
    assert not world.follower.is_primary_silent(0.5)
    world.now_seconds += 0.6
    assert world.follower.is_primary_silent(0.5)
    world.link.data_received(MARK)
    assert not world.follower.is_primary_silent(0.5)
    world.now_seconds += 0.6
    world.follower.leave()
    assert not world.follower.is_primary_silent(0.5)


async def test_a_primary_that_is_not_there_is_lost() -> None:
    world = FollowerWorld()
    world.follower.leave()
    gone = Member(PRIMARY.member_id, (), f"127.0.0.1:{free_port()}")
    world.follower.follow(3, gone)
    await until(lambda: len(world.lost) == 1)


async def test_a_primary_that_is_followed_is_not_followed_twice() -> None:
    world = FollowerWorld()
    world.follower.leave()
    connected = 0

    def connection() -> asyncio.Protocol:
        nonlocal connected
        connected += 1
        return asyncio.Protocol()

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    primary = Member(PRIMARY.member_id, (), f"127.0.0.1:{port}")
    for _ in range(3):
        world.follower.follow(3, primary)
    await until(lambda: connected)
    world.follower.follow(3, primary)
    assert world.follower._task
    await world.follower._task
    world.follower.follow(4, primary)
    await until(lambda: connected == 2)
    world.follower.leave()
    server.close()
