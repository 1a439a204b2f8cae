"""What servers of a shard send each other before records."""

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.server.cluster.directory import Member, MemberId
from kvpool.server.cluster.messages import (
    VERSION,
    Hello,
    Refused,
    Welcome,
    acknowledged_position,
    acknowledgement,
    answer_of,
    core_fingerprint,
    hello_of,
    to_frame,
)
from kvpool.server.codec import DamageError, dumps, loads
from kvpool.server.journal.frames import Frame, FrameKind, FrameParser

HELLO = Hello(VERSION, "c/main", "core", "secret", Member(MemberId("m"), ("a:1", "b:2"), "a:3"), 4, 3, 17)


def frame_of(encoded: bytes) -> Frame:
    (frame,) = FrameParser().feed(encoded)
    return frame


def test_a_hello_is_read_as_written() -> None:
    frame = frame_of(to_frame(HELLO))
    assert frame.kind is FrameKind.HELLO
    assert hello_of(frame.payload) == HELLO


@pytest.mark.parametrize(
    "message", [Welcome(7, resumes=True, now_seconds=7.0), Refused("OTHER_SHARD", "another shard")]
)
def test_an_answer_is_read_as_written(message: Welcome | Refused) -> None:
    frame = frame_of(to_frame(message))
    assert answer_of(frame.kind, frame.payload) == message


@pytest.mark.parametrize("position", [-1, 0, 2**40])
def test_an_acknowledgement_is_read_as_written(position: int) -> None:
    frame = frame_of(acknowledgement(position))
    assert frame.kind is FrameKind.ACKNOWLEDGED
    assert acknowledged_position(frame.payload) == position


@pytest.mark.parametrize("payload", [b"\x80\x80", *map(dumps, (None, True, "1", 1.5, [1], {"position": 1}, b"1"))])
def test_an_acknowledgement_of_anything_else_is_damage(payload: bytes) -> None:
    with pytest.raises(DamageError):
        acknowledged_position(payload)


def test_the_token_is_not_in_the_text_of_a_hello() -> None:
    assert "secret" not in repr(HELLO)


WAYS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a missing field": lambda plain: plain.pop("token"),
    "an additional field": lambda plain: plain.update(more=1),
    "another type": lambda plain: plain.update(term="4"),
    "no member": lambda plain: plain.update(member=None),
    "a member of another form": lambda plain: plain["member"].update(addresses="a:1"),
    "an address that is no text": lambda plain: plain["member"].update(addresses=[1]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_malformed_hello_is_damage(way: str) -> None:
    plain = loads(frame_of(to_frame(HELLO)).payload)
    WAYS[way](plain)
    with pytest.raises(DamageError):
        hello_of(dumps(plain))


@pytest.mark.parametrize("kind", [kind for kind in FrameKind if kind not in (FrameKind.WELCOME, FrameKind.REFUSED)])
def test_another_kind_is_no_answer(kind: FrameKind) -> None:
    with pytest.raises(DamageError, match=kind.name):
        answer_of(kind, frame_of(to_frame(Welcome(7, resumes=True, now_seconds=7.0))).payload)


def test_a_refusal_is_no_welcome() -> None:
    with pytest.raises(DamageError):
        answer_of(FrameKind.WELCOME, frame_of(to_frame(Refused("A", "b"))).payload)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("kvpool.server.cluster.messages.VERSION", VERSION + 1),
        ("kvpool.server.cluster.messages.python_version", lambda: "3.0.0"),
        ("kvpool.core.__path__", []),
        ("kvpool.wire.changes.__file__", __file__),
    ],
)
def test_the_fingerprint_follows_from_what_decides_results(
    name: str, other: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = core_fingerprint.__wrapped__()
    assert first == core_fingerprint()
    assert len(first) == 32
    monkeypatch.setattr(name, other)
    assert core_fingerprint.__wrapped__() != first
