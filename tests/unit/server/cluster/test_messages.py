"""What servers of a shard say on a link."""

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.core.errors import WrongStateError
from kvpool.server.cluster import messages
from kvpool.server.cluster.directory import Member, MemberId
from kvpool.server.cluster.messages import Hello, Welcome, acknowledged_position, core_fingerprint
from kvpool.server.codec import DamageError, dumps, encode, loads
from kvpool.v1.link_pb2 import LinkHello, LinkWelcome
from kvpool.wire.frames import HEAD
from kvpool.wire.protocol_version import PROTOCOL_VERSION
from support.refusals import refused

HELLO = Hello("c/main", "core", Member(MemberId("m"), ("a:1", "b:2"), "a:3"), 4, 3, 17)
WELCOME = Welcome(7, resumes=True, now_seconds=7.0)


def payload_of(frame: bytes) -> bytes:
    return frame[HEAD.size :]


def test_messages_are_read_as_written() -> None:
    assert messages.read_hello(payload_of(messages.hello("secret", HELLO))) == ("secret", HELLO)
    assert messages.read_welcome(payload_of(messages.welcome(WELCOME))) == WELCOME
    for position in (-1, 0, 2**40):
        assert acknowledged_position(payload_of(messages.acknowledgement(position))) == position


def test_a_server_of_another_protocol_version_is_refused_and_its_operator_is_told_what_to_do() -> None:
    other = LinkHello(protocol_version=9, replication=encode(Hello, HELLO))
    with refused(WrongStateError, reason="PROTOCOL_VERSION", match="plan a restart with the journal"):
        messages.read_hello(other.SerializeToString())


@pytest.mark.parametrize("payload", [b"\x80\x80", *map(dumps, (None, True, "1", 1.5, [1], {"position": 1}, b"1"))])
def test_an_acknowledgement_of_anything_else_is_damage(payload: bytes) -> None:
    with pytest.raises(DamageError):
        acknowledged_position(payload)


WAYS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a missing field": lambda plain: plain.pop("core"),
    "an additional field": lambda plain: plain.update(more=1),
    "another type": lambda plain: plain.update(term="4"),
    "no member": lambda plain: plain.update(member=None),
    "a member of another form": lambda plain: plain["member"].update(addresses="a:1"),
    "an address that is no text": lambda plain: plain["member"].update(addresses=[1]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_malformed_hello_is_damage(way: str) -> None:
    plain = loads(encode(Hello, HELLO))
    WAYS[way](plain)
    with pytest.raises(DamageError):
        messages.read_hello(LinkHello(replication=dumps(plain)).SerializeToString())


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff",
        LinkWelcome(protocol_version=PROTOCOL_VERSION).SerializeToString(),
        LinkWelcome(protocol_version=9, replication=encode(Welcome, WELCOME)).SerializeToString(),
    ],
    ids=["garbage", "nothing", "version"],
)
def test_another_answer_is_damage(payload: bytes) -> None:
    """It is no error of the standby's own state."""
    with pytest.raises(DamageError):
        messages.read_welcome(payload)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("kvpool.server.cluster.messages.PROTOCOL_VERSION", PROTOCOL_VERSION + 1),
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
