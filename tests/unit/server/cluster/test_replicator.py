"""What standbys get of a primary over real sockets, and what is refused. No mark is sent unless a test does."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvpool.core.errors import KvpoolError
from kvpool.server.cluster import replicator as replicator_module
from kvpool.server.cluster import shard_member
from kvpool.server.cluster.directory import MemberId
from kvpool.server.cluster.messages import Hello, Welcome, acknowledgement, core_fingerprint, hello
from kvpool.server.cluster.record_buffer import RecordBuffer
from kvpool.server.cluster.replicator import MAX_PENDING, Replicator, StandbyConnection
from kvpool.server.cluster.standbys import NOTHING
from kvpool.server.codec import dumps
from kvpool.server.journal.frames import FrameKind, encode_frame
from kvpool.v1.link_pb2 import LinkHello
from kvpool.wire import link
from kvpool.wire.address import host_and_port
from kvpool.wire.frames import encode_frame as link_frame
from support.directory import member_of
from support.memory_directory import Store
from support.raw_link import steps_hello
from support.replicas import SHARD, PlayedStandby, ReplicaServer, encoded, servers_of_a_shard, until

OTHER = member_of("other")
HELLO = Hello(SHARD, core_fingerprint(), OTHER, 1, 0, NOTHING)


class Primary:
    """A primary without standbys, and the connections of those that a test plays."""

    def __init__(self, server: ReplicaServer) -> None:
        self.server = server
        self.replicator: Replicator = server.shard.replicator
        self.replica = server.shard.replica
        self.connections: list[PlayedStandby] = []

    def append(self, record: bytes) -> None:
        self.replicator.append(encode_frame(FrameKind.RECORD, record))

    def is_in_sync(self) -> bool:
        return OTHER in self.replica.in_sync


@pytest.fixture(name="primary")
async def fixture_primary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Primary]:
    monkeypatch.setattr(shard_member, "BEAT_SECONDS", 3600.0)
    async with servers_of_a_shard(tmp_path, 1, Store()) as (server,):
        primary = Primary(server)
        primary.replicator.begin()  # without the records with which the server became the primary
        yield primary
        for connection in primary.connections:
            connection.close()
        await server.die()
        await until(lambda: not primary.replicator._open)


async def connected(primary: Primary, said: Hello | None = None) -> PlayedStandby:
    address = host_and_port("replication_address", primary.server.shard.me.replication_address)
    connection = PlayedStandby(*await asyncio.open_connection(*address))
    primary.connections.append(connection)
    if said:
        connection.send(hello("", said))
    return connection


async def joined(primary: Primary) -> PlayedStandby:
    """A standby that is in sync."""
    connection = await connected(primary, HELLO)
    welcome = await connection.answer()
    assert isinstance(welcome, Welcome)
    await connection.snapshot()
    await until(lambda: primary.replicator.connections[OTHER.member_id].is_live)
    connection.send(acknowledgement(welcome.position))
    await until(primary.is_in_sync)
    return connection


async def joined_without_reading(primary: Primary) -> tuple[PlayedStandby, StandbyConnection]:
    """A standby that reads nothing of its snapshot."""
    async with primary.server.journal.snapshot_lock:
        standby = await connected(primary, HELLO)
        await until(lambda: primary.replicator.connections)
        found = primary.replicator.connections[OTHER.member_id]
        found.pause_writing()  # as asyncio does when much is not read
    return standby, found


async def test_a_new_standby_gets_a_snapshot_then_each_record(primary: Primary) -> None:
    primary.append(b"before")
    connection = await connected(primary, HELLO)
    assert await connection.answer() == Welcome(0, resumes=False, now_seconds=0.0)
    assert encoded(await connection.snapshot()) == encoded(primary.server.state)
    primary.append(b"one")
    primary.replicator.mark()
    assert [await connection.record() for _ in range(2)] == [b"one", b""]
    assert primary.replicator.num_sent_bytes == connection.num_received_bytes


async def test_a_standby_is_in_sync_when_it_has_acknowledged_everything(primary: Primary) -> None:
    connection = await connected(primary, HELLO)
    await connection.answer()
    await connection.snapshot()
    primary.append(b"one")
    await connection.record()
    assert not primary.is_in_sync()
    connection.send(acknowledgement(0))
    await until(primary.is_in_sync)
    assert primary.replica.confirmed == 0
    primary.append(b"two")
    assert primary.replica.confirmed == 0
    connection.send(acknowledgement(1))
    await until(lambda: primary.replica.confirmed == 1)
    connection.close()
    await until(lambda: not primary.is_in_sync())


@pytest.mark.parametrize("num_kept", [0, 2])
async def test_a_standby_resumes_with_the_kept_frames(primary: Primary, num_kept: int) -> None:
    primary.append(b"had")
    for number in range(num_kept):
        primary.append(b"%d" % number)
    connection = await connected(primary, replace(HELLO, resumed_term=1, resumed_position=0))
    assert await connection.answer() == Welcome(0, resumes=True, now_seconds=0.0)
    assert [await connection.record() for _ in range(num_kept)] == [b"0", b"1"][:num_kept]
    primary.replicator.mark()
    assert await connection.record() == b""


@pytest.mark.parametrize(
    ("term", "position"), [(0, 0), (2, 0), (1, 1), (1, -2), (1, 2**70)], ids=["none", "later", "new", "bad", "huge"]
)
async def test_a_standby_that_cannot_resume_gets_a_snapshot(primary: Primary, term: int, position: int) -> None:
    primary.append(b"one")
    connection = await connected(primary, replace(HELLO, resumed_term=term, resumed_position=position))
    assert await connection.answer() == Welcome(0, resumes=False, now_seconds=0.0)


async def test_a_snapshot_waits_until_the_standby_is_not_in_sync(primary: Primary) -> None:
    """Rule 2."""
    connection = await joined(primary)
    primary.server.directory.is_up = False
    again = await connected(primary, HELLO)
    assert await connection.is_ended()
    await until(lambda: primary.replica.pending)
    reading = asyncio.create_task(again.answer())
    await until(lambda: primary.replicator.connections[OTHER.member_id].member)
    assert not reading.done()
    assert not primary.server.state._is_read
    primary.server.directory.is_up = True
    assert isinstance(await reading, Welcome)


async def test_a_snapshot_waits_until_the_journal_has_read_the_state(primary: Primary) -> None:
    async with primary.server.journal.snapshot_lock:
        connection = await connected(primary, HELLO)
        await until(lambda: primary.replicator.connections)
        primary.append(b"one")
        assert not primary.server.state._is_read
    assert await connection.answer() == Welcome(0, resumes=False, now_seconds=0.0)


async def test_the_newest_of_two_connections_of_a_member_counts(primary: Primary) -> None:
    first = await joined(primary)
    second = await connected(primary, replace(HELLO, resumed_term=1, resumed_position=NOTHING))
    assert await first.is_ended()
    assert await second.answer() == Welcome(NOTHING, resumes=True, now_seconds=0.0)
    assert len(primary.replicator.connections) == 1
    assert primary.is_in_sync(), "the end of the first connection is not the end of the member"
    primary.append(b"one")
    await second.record()
    second.send(acknowledgement(0))
    await until(lambda: primary.replica.confirmed == 0)


async def test_a_standby_that_is_slower_than_the_kept_records_is_left(
    primary: Primary, caplog: pytest.LogCaptureFixture
) -> None:
    primary.replicator.log = RecordBuffer(1000)
    await connected(primary, HELLO)
    async with asyncio.timeout(60):
        while "standby too slow" not in caplog.messages:
            primary.append(bytes(600))
            primary.append(bytes(600))
            await asyncio.sleep(0)
    await until(lambda: not primary.replicator.connections)
    assert not primary.is_in_sync()


async def test_a_standby_that_does_not_read_its_snapshot_is_left(
    primary: Primary, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicator_module, "STALL_SECONDS", 0.01)
    await joined_without_reading(primary)
    await until(lambda: not primary.replicator.connections)
    assert "standby does not read" in caplog.messages
    assert not primary.server.state._is_read


async def test_a_snapshot_goes_on_when_the_standby_reads_again(primary: Primary) -> None:
    connection, of_primary = await joined_without_reading(primary)
    await connection.answer()
    assert not of_primary.is_live
    of_primary.resume_writing()
    await connection.snapshot()
    await until(lambda: of_primary.is_live)


async def test_no_snapshot_is_read_after_the_end(primary: Primary) -> None:
    """The journal writes its last snapshot then."""
    await joined_without_reading(primary)
    await until(lambda: primary.server.state._is_read)
    await primary.replicator.close()
    assert not primary.server.state._is_read


# Refused

REFUSED = {
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "MALFORMED"),
    "a hello for steps": (steps_hello(""), "MALFORMED"),
    "a hello without fields": (link.hello(LinkHello(replication=dumps({}))), "MALFORMED"),
    "a deep hello": (link.hello(LinkHello(replication=b"\x81" * 16_000)), "MALFORMED"),
    "another shard": (hello("", replace(HELLO, shard="other")), "OTHER_SHARD"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_connection_without_a_valid_hello_is_refused(primary: Primary, name: str) -> None:
    content, reason = REFUSED[name]
    connection = await connected(primary)
    connection.send(content)
    answer = await connection.answer()
    assert isinstance(answer, KvpoolError)
    assert answer.reason == reason
    assert await connection.is_ended()
    await until(lambda: not primary.replicator._open)
    assert not primary.replicator.connections
    assert len(primary.replica.in_sync) == 1


async def test_a_connection_that_sends_nothing_is_closed(primary: Primary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 3."""
    monkeypatch.setattr(replicator_module, "HANDSHAKE_SECONDS", 0.01)
    assert await (await connected(primary)).is_ended()


def _has_links(primary: Primary, count: int) -> bool:
    return len(primary.replicator._open) == count


async def test_many_connections_without_hello_end_the_oldest_and_no_standby(primary: Primary) -> None:
    standby = await joined(primary)
    waiting = []
    for number in range(1, MAX_PENDING + 2):
        waiting.append(await connected(primary))
        await until(partial(_has_links, primary, 1 + min(number, MAX_PENDING)))
    assert await waiting[0].is_ended()
    primary.append(b"one")
    assert await standby.record() == b"one"
    waiting[1].send(hello("", replace(HELLO, member=replace(OTHER, member_id=MemberId("third")))))
    assert isinstance(await waiting[1].answer(), Welcome)


WRONG: dict[str, bytes] = {
    "a position that does not exist": acknowledgement(1),
    "a position that goes back": acknowledgement(0) + acknowledgement(NOTHING),
    "no position": link_frame(link.Kind.REQUEST, dumps("1")),
    "a large frame": link_frame(link.Kind.REQUEST, dumps("x" * 64)),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_standby_that_sends_anything_else_is_left(primary: Primary, name: str) -> None:
    connection = await joined(primary)
    primary.append(b"one")
    assert await connection.record() == b"one"
    connection.send(WRONG[name])
    assert isinstance(await connection.answer(), KvpoolError)
    await until(lambda: not primary.is_in_sync())
    assert not primary.replicator.connections


async def test_a_bug_in_a_snapshot_ends_the_connection(
    primary: Primary, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(replicator_module, "snapshot_frames", fail)
    with caplog.at_level(logging.ERROR, "kvpool.server.cluster"):
        await connected(primary, HELLO)
        await until(lambda: "bug" in caplog.messages)
    await until(lambda: not primary.replicator.connections)
