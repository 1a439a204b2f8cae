"""Tests of cluster/shipper.py with real sockets: what followers get, and what is refused."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvpool.core.errors import WrongStateError
from kvpool.server.cluster import shipper as shipper_module
from kvpool.server.cluster.directory import Entry, MemberId, Swap
from kvpool.server.cluster.messages import (
    MAX_HELLO_BYTES,
    VERSION,
    Hello,
    Refused,
    Welcome,
    acknowledgement,
    to_frame,
)
from kvpool.server.cluster.replica import NOTHING, Effect, Replica, SendSwap
from kvpool.server.cluster.shipper import MAX_PENDING_LINKS, Shipper
from kvpool.server.codec import dumps
from kvpool.server.journal.frames import FrameKind, encode_frame
from support.core import World
from support.directory import member_of
from support.replicas import PlayedFollower, encoded, until
from support.state import DrivenState

ME, OTHER = member_of("me"), member_of("other")
HELLO = Hello(VERSION, "c/main", "core", "", OTHER, 1, 0, NOTHING)
MARK = (FrameKind.MARK, b"")


class Primary:
    """A primary whose swaps win at once, with its shipper.

    Attributes:
        holds_swaps: Whether swaps stay without an answer.
        swaps: The swaps that have no answer.
    """

    def __init__(self, max_log_bytes: int = 2**20) -> None:
        self.now_seconds = 100.0
        self.connections: list[PlayedFollower] = []
        self.holds_swaps = False
        self.swaps: list[SendSwap] = []
        self.replica = Replica(ME, has_state=False, known_term=0, new_id=lambda: "id")
        self.state = DrivenState()
        self.world = World(allocator=self.state)
        self.lock = asyncio.Lock()
        self.shipper = Shipper(
            self.replica,
            self.state,
            self.lock,
            check=self._check,
            carry_out=self._carry_out,
            max_log_bytes=max_log_bytes,
            now_seconds=lambda: self.now_seconds,
            state_seconds=lambda: 7.0,
        )
        self._carry_out(self.replica.directory_read(Entry(0, None)))
        self.shipper.begin()

    async def listen(self) -> None:
        self.port = await self.shipper.listen("127.0.0.1", 0, None)

    def append(self, record: bytes) -> None:
        self.shipper.append(encode_frame(FrameKind.RECORD, record))

    async def close(self) -> None:
        for connection in self.connections:
            connection.close()
        await self.shipper.close()
        await until(lambda: not self.shipper._open)

    def end_swaps(self) -> None:
        while self.swaps:
            swap = self.swaps.pop(0)
            self._carry_out(self.replica.swap_ended(Swap(won=True, entry=Entry(swap.revision + 1, swap.record))))

    def is_in_sync(self) -> bool:
        return OTHER in self.replica.in_sync

    def _carry_out(self, effects: list[Effect]) -> None:
        self.swaps += [effect for effect in effects if isinstance(effect, SendSwap)]
        if not self.holds_swaps:
            self.end_swaps()

    def _check(self, hello: Hello) -> None:
        if hello.shard != HELLO.shard:
            raise WrongStateError("OTHER_SHARD", "another shard")


@pytest.fixture(name="primary")
async def fixture_primary() -> AsyncIterator[Primary]:
    primary = Primary()
    await primary.listen()
    yield primary
    await primary.close()


async def connected(primary: Primary, hello: Hello | None = None) -> PlayedFollower:
    connection = PlayedFollower(*await asyncio.open_connection("127.0.0.1", primary.port))
    primary.connections.append(connection)
    if hello:
        connection.send(to_frame(hello))
    return connection


async def joined(primary: Primary) -> PlayedFollower:
    """A follower that is in sync."""
    connection = await connected(primary, HELLO)
    welcome = await connection.answer()
    assert isinstance(welcome, Welcome)
    await connection.snapshot()
    await until(lambda: primary.shipper.links[OTHER.member_id].is_live)
    connection.send(acknowledgement(welcome.position))
    await until(primary.is_in_sync)
    return connection


async def test_a_new_follower_gets_a_snapshot_then_each_record(primary: Primary) -> None:
    primary.append(b"before")
    connection = await connected(primary, HELLO)
    assert await connection.answer() == Welcome(0, resumes=False, now_seconds=7.0)
    assert encoded(await connection.snapshot()) == encoded(primary.state)
    primary.append(b"one")
    primary.shipper.mark()
    assert [(frame.kind, frame.payload) for frame in (await connection.frame(), await connection.frame())] == [
        (FrameKind.RECORD, b"one"),
        MARK,
    ]


async def test_a_follower_is_in_sync_when_it_has_acknowledged_everything(primary: Primary) -> None:
    connection = await connected(primary, HELLO)
    await connection.answer()
    await connection.snapshot()
    primary.append(b"one")
    await connection.frame()
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
async def test_a_follower_resumes_with_the_kept_frames(primary: Primary, num_kept: int) -> None:
    primary.append(b"had")
    for number in range(num_kept):
        primary.append(b"%d" % number)
    connection = await connected(primary, replace(HELLO, resumed_term=1, resumed_position=0))
    assert await connection.answer() == Welcome(0, resumes=True, now_seconds=7.0)
    assert [(await connection.frame()).payload for _ in range(num_kept)] == [b"0", b"1"][:num_kept]
    primary.shipper.mark()
    assert (await connection.frame()).kind is FrameKind.MARK


@pytest.mark.parametrize(
    ("term", "position"), [(0, 0), (2, 0), (1, 1), (1, -2), (1, 2**70)], ids=["none", "later", "new", "bad", "huge"]
)
async def test_a_follower_that_cannot_resume_gets_a_snapshot(primary: Primary, term: int, position: int) -> None:
    primary.append(b"one")
    connection = await connected(primary, replace(HELLO, resumed_term=term, resumed_position=position))
    assert await connection.answer() == Welcome(0, resumes=False, now_seconds=7.0)


async def test_a_snapshot_waits_until_the_follower_is_not_in_sync(primary: Primary) -> None:
    """Rule 2."""
    connection = await joined(primary)
    primary.holds_swaps = True
    again = await connected(primary, HELLO)
    assert await connection.is_ended()
    await until(lambda: primary.swaps)
    assert not primary.replica.may_load_snapshot(OTHER.member_id)
    reading = asyncio.create_task(again.answer())
    await until(lambda: primary.shipper.links[OTHER.member_id]._snapshot)
    assert not reading.done()
    assert not primary.state._is_read
    primary.holds_swaps = False
    primary.end_swaps()
    assert isinstance(await reading, Welcome)


async def test_a_snapshot_waits_until_the_journal_has_read_the_state(primary: Primary) -> None:
    async with primary.lock:
        connection = await connected(primary, HELLO)
        await until(lambda: primary.shipper.links)
        primary.append(b"one")
        assert not primary.state._is_read
    assert await connection.answer() == Welcome(0, resumes=False, now_seconds=7.0)


async def test_the_newest_of_two_connections_of_a_member_counts(primary: Primary) -> None:
    first = await joined(primary)
    second = await connected(primary, replace(HELLO, resumed_term=1, resumed_position=NOTHING))
    assert await first.is_ended()
    assert await second.answer() == Welcome(NOTHING, resumes=True, now_seconds=7.0)
    assert len(primary.shipper.links) == 1
    assert primary.is_in_sync(), "the end of the first connection is not the end of the member"
    primary.append(b"one")
    await second.frame()
    second.send(acknowledgement(0))
    await until(lambda: primary.replica.confirmed == 0)


async def test_a_follower_that_is_slower_than_the_kept_records_is_left(caplog: pytest.LogCaptureFixture) -> None:
    primary = Primary(max_log_bytes=1000)
    await primary.listen()
    await connected(primary, HELLO)
    async with asyncio.timeout(60):
        while "standby too slow" not in caplog.messages:
            primary.append(bytes(600))
            primary.append(bytes(600))
            await asyncio.sleep(0)
    await until(lambda: not primary.shipper.links)
    assert not primary.is_in_sync()
    await primary.close()


async def test_a_follower_that_does_not_read_its_snapshot_is_left(
    primary: Primary, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipper_module, "STALL_SECONDS", 0.01)
    async with primary.lock:
        await connected(primary, HELLO)
        await until(lambda: primary.shipper.links)
        primary.shipper.links[OTHER.member_id].pause_writing()  # as asyncio does when much is not read
    await until(lambda: not primary.shipper.links)
    assert "standby does not read" in caplog.messages
    assert not primary.state._is_read


async def test_a_snapshot_goes_on_when_the_follower_reads_again(primary: Primary) -> None:
    async with primary.lock:
        connection = await connected(primary, HELLO)
        await until(lambda: primary.shipper.links)
        link = primary.shipper.links[OTHER.member_id]
        link.pause_writing()
    await connection.answer()
    assert not link.is_live
    link.resume_writing()
    await connection.snapshot()
    await until(lambda: link.is_live)


async def test_no_snapshot_is_read_after_the_end(primary: Primary) -> None:
    """The journal writes its last snapshot then."""
    async with primary.lock:
        await connected(primary, HELLO)
        await until(lambda: primary.shipper.links)
        primary.shipper.links[OTHER.member_id].pause_writing()
    await until(lambda: primary.state._is_read)
    await primary.shipper.close()
    assert not primary.state._is_read


# Refused

REFUSED = {
    "garbage": (b"\0" * 64, "MALFORMED"),
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "MALFORMED"),
    "a damaged frame": (to_frame(HELLO)[:-1] + b"\xff", "MALFORMED"),
    "an unknown kind": (encode_frame(99, b""), "MALFORMED"),  # type: ignore[arg-type]
    "no hello": (encode_frame(*MARK), "MALFORMED"),
    "an acknowledgement first": (acknowledgement(0), "MALFORMED"),
    "a malformed hello": (encode_frame(FrameKind.HELLO, b"\x80"), "MALFORMED"),
    "a hello without fields": (encode_frame(FrameKind.HELLO, dumps({})), "MALFORMED"),
    "a deep hello": (encode_frame(FrameKind.HELLO, b"\x81" * (MAX_HELLO_BYTES - 1)), "MALFORMED"),
    "a large hello": (encode_frame(FrameKind.HELLO, bytes(MAX_HELLO_BYTES + 1)), "MALFORMED"),
    "another shard": (to_frame(replace(HELLO, shard="c/other")), "OTHER_SHARD"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_connection_without_a_valid_hello_is_refused(primary: Primary, name: str) -> None:
    content, reason = REFUSED[name]
    connection = await connected(primary)
    connection.send(content)
    answer = await connection.answer()
    assert isinstance(answer, Refused)
    assert answer.reason == reason
    assert await connection.is_ended()
    await until(lambda: not primary.shipper._open)
    assert not primary.shipper.links
    assert primary.replica.in_sync == (ME,)


async def test_a_large_hello_is_refused_before_it_is_received(primary: Primary) -> None:
    connection = await connected(primary)
    connection.send(encode_frame(FrameKind.HELLO, bytes(MAX_HELLO_BYTES + 1))[:13])
    assert isinstance(await connection.answer(), Refused)


async def test_a_connection_that_sends_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 3."""
    monkeypatch.setattr(shipper_module, "HANDSHAKE_SECONDS", 0.01)
    primary = Primary()
    await primary.listen()
    connection = await connected(primary)
    assert await connection.is_ended()
    await primary.close()


def _has_links(primary: Primary, count: int) -> bool:
    return len(primary.shipper._open) == count


async def test_many_connections_without_hello_end_the_oldest_and_no_follower(primary: Primary) -> None:
    follower = await joined(primary)
    waiting = []
    for number in range(1, MAX_PENDING_LINKS + 2):
        waiting.append(await connected(primary))
        await until(partial(_has_links, primary, 1 + min(number, MAX_PENDING_LINKS)))
    assert await waiting[0].is_ended()
    primary.append(b"one")
    assert (await follower.frame()).payload == b"one"
    waiting[1].send(to_frame(replace(HELLO, member=replace(OTHER, member_id=MemberId("third")))))
    assert isinstance(await waiting[1].answer(), Welcome)


WRONG: dict[str, bytes] = {
    "a position that does not exist": acknowledgement(1),
    "a position that goes back": acknowledgement(0) + acknowledgement(NOTHING),
    "no position": encode_frame(FrameKind.ACKNOWLEDGED, dumps("1")),
    "a boolean": encode_frame(FrameKind.ACKNOWLEDGED, dumps(True)),  # noqa: FBT003 - a value
    "not CBOR": encode_frame(FrameKind.ACKNOWLEDGED, b"\x80\x80"),
    "a large frame": encode_frame(FrameKind.ACKNOWLEDGED, dumps("x" * 64)),
    "another kind": encode_frame(FrameKind.MARK, dumps(0)),
    "a second hello": encode_frame(FrameKind.HELLO, dumps(0)),
    "garbage": b"\0" * 64,
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_follower_that_sends_anything_else_is_left(primary: Primary, name: str) -> None:
    connection = await joined(primary)
    primary.append(b"one")
    assert (await connection.frame()).payload == b"one"
    connection.send(WRONG[name])
    assert isinstance(await connection.answer(), Refused)
    await until(lambda: not primary.is_in_sync())
    assert not primary.shipper.links


async def test_a_bug_in_a_snapshot_ends_the_connection(
    primary: Primary, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(shipper_module, "snapshot_frames", fail)
    with caplog.at_level(logging.ERROR, "kvpool.server.cluster"):
        await connected(primary, HELLO)
        await until(lambda: "bug" in caplog.messages)
    await until(lambda: not primary.shipper.links)
