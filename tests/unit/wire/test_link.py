"""The rules of a link, on both sides, and where a server takes steps."""

from pathlib import Path
from typing import Final

import pytest

from kvpool.core.errors import ExhaustedError, InvalidArgumentError, KvpoolError, UnavailableError, WrongStateError
from kvpool.v1.link_pb2 import LinkHello, LinkWelcome, StepsHello
from kvpool.wire import link
from kvpool.wire.errors import ServerError, to_status
from kvpool.wire.frames import HEAD, FrameReader, encode_frame
from kvpool.wire.link import Kind
from kvpool.wire.protocol_version import PROTOCOL_VERSION
from support.raw_link import steps_hello
from support.refusals import refused
from support.transcripts import Played, check

MAX_BYTES: Final = 20_000
HELLO, WELCOME, REFUSED, REQUEST, ANSWER, PROBE, PROOF = 1, 2, 3, 4, 5, 6, 7
FIRST: Final = {
    "server": link.server_state(MAX_BYTES, is_probed=True),
    "client": link.client_state(is_probed=True),
    "lender": link.server_state(MAX_BYTES),
    "engine": link.client_state(MAX_BYTES, refusal_ends=False),
}
WAYS: Final = {
    "server": [(), (PROBE,), (HELLO,)],
    "client": [(), (PROOF,), (WELCOME,), (REFUSED,), (WELCOME, REFUSED)],
    "lender": [(), (HELLO,)],
    "engine": [(), (WELCOME,), (REFUSED,), (WELCOME, REFUSED)],
}
"""Frames that lead a side to each of its states."""
MAY_FOLLOW: Final = {
    ("server", "greeting", PROBE): ("probed", 64),
    ("server", "greeting", HELLO): ("open", 16_384),
    ("server", "probed", HELLO): ("open", 16_384),
    ("server", "open", REQUEST): ("open", MAX_BYTES),
    ("client", "greeting", PROOF): ("probed", 64),
    ("client", "greeting", WELCOME): ("open", 16_384),
    ("client", "greeting", REFUSED): ("over", 16_384),
    ("client", "probed", WELCOME): ("open", 16_384),
    ("client", "probed", REFUSED): ("over", 16_384),
    ("client", "open", ANSWER): ("open", 2**31),
    ("client", "open", REFUSED): ("over", 16_384),
    ("lender", "greeting", HELLO): ("open", 16_384),
    ("lender", "open", REQUEST): ("open", MAX_BYTES),
    ("engine", "greeting", WELCOME): ("open", 16_384),
    ("engine", "greeting", REFUSED): ("over", 16_384),
    ("engine", "open", ANSWER): ("open", MAX_BYTES),
    ("engine", "open", REFUSED): ("open", 16_384),
}
"""State after each frame, and the maximum size of its payload."""
OF_S: Final = StepsHello(server_id="s")


def side(name: str, way: tuple[int, ...] = ()) -> FrameReader:
    found = FrameReader(FIRST[name])
    for kind in way:
        assert found.feed(encode_frame(kind, b""))
    return found


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in WAYS for way in WAYS[name]], ids=str)
def test_each_side_takes_the_frames_that_may_follow_and_no_others(name: str, way: tuple[int, ...]) -> None:
    for kind in (0, HELLO, WELCOME, REFUSED, REQUEST, ANSWER, PROBE, PROOF, 255):
        found = side(name, way)
        following = MAY_FOLLOW.get((name, found.state.name, kind))
        if following:
            assert found.feed(encode_frame(kind, b"x")) == [(kind, b"x")]
            assert found.state.name == following[0]
        else:
            with refused(InvalidArgumentError, field="kind", reason="MALFORMED"):
                found.feed(encode_frame(kind, b"")[: HEAD.size])


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in WAYS for way in WAYS[name]], ids=str)
def test_the_state_decides_the_maximum_size_of_each_frame(name: str, way: tuple[int, ...]) -> None:
    for (of_side, state, kind), (_, max_bytes) in MAY_FOLLOW.items():
        if (of_side, state) == (name, side(name, way).state.name):
            assert side(name, way).feed(HEAD.pack(max_bytes, kind)) == []
            with refused(ExhaustedError, reason="MESSAGE_TOO_LARGE", match=f"the maximum is {max_bytes}$"):
                side(name, way).feed(HEAD.pack(max_bytes + 1, kind))


class Ends(Played):
    """Both ends of a link, and what each makes of the frames of the other.

    | command | what happens |
    |---|---|
    | `begin` | another link |
    | `client HELLO 30 [60]` | the client sends a frame with a payload of 30 bytes, whose head announces 60 |
    | `server WELCOME 2` | the same of the server |
    | `rest 30` | the client sends the rest of its frame |
    """

    def __init__(self) -> None:
        super().__init__()
        self._do_begin()

    def _do_begin(self) -> None:
        self._links = {name: side(name) for name in ("server", "client")}
        self._refused: set[str] = set()

    def _do_client(self, kind: str, size: str = "0", announced: str = "") -> None:
        self._send("server", kind, size, announced)

    def _do_server(self, kind: str, size: str = "0", announced: str = "") -> None:
        self._send("client", kind, size, announced)

    def _send(self, to: str, kind: str, size: str, announced: str) -> None:
        number = int(kind) if kind.isdigit() else int(Kind[kind])
        self._take(to, HEAD.pack(int(announced or size), number) + bytes(int(size)))

    def _do_rest(self, size: str) -> None:
        self._take("server", bytes(int(size)))

    def _take(self, to: str, data: bytes) -> None:
        try:
            taken = self._links[to].feed(data)
        except KvpoolError as error:
            self._refused.add(to)
            self.lines.append(f"{to} refuses: {error.reason}: {error}")
        else:
            self.lines += [f"{to} takes {Kind(found).name} of {len(payload)} bytes" for found, payload in taken]

    def _state(self) -> str:
        torn = [name for name, found in self._links.items() if found.torn and name not in self._refused]
        waits = "".join(f"; {name} waits for the rest of a frame" for name in torn)
        return ", ".join(f"{name} {found.state.name}" for name, found in self._links.items()) + waits


def test_both_ends_of_a_link_behave_as_the_transcript_shows() -> None:
    check(Path(__file__).with_name("transcripts") / "link.txt", Ends().execute)


def payload_of(frame: bytes) -> bytes:
    return frame[HEAD.size :]


def test_a_hello_names_server_session_and_token() -> None:
    frame = steps_hello("server-1", "session-1", "kvp_secret")
    found = link.read_hello(payload_of(frame), "steps", "server-1")
    assert frame[HEAD.size - 1] == HELLO
    assert (found.token, found.protocol_version) == ("kvp_secret", PROTOCOL_VERSION)
    assert found.steps == StepsHello(server_id="server-1", session_id="session-1")


def test_a_hello_may_leave_the_version_unstated() -> None:
    assert link.read_hello(LinkHello(steps=OF_S).SerializeToString(), "steps", "s").steps == OF_S


@pytest.mark.parametrize(
    ("payload", "kind", "field", "reason"),
    [
        (LinkHello(protocol_version=9, steps=OF_S), WrongStateError, "protocol_version", "PROTOCOL_VERSION"),
        (LinkHello(steps=StepsHello(server_id="t")), UnavailableError, "server_id", "OTHER_SERVER"),
        (LinkHello(), UnavailableError, "server_id", "OTHER_SERVER"),
        (b"\xff", InvalidArgumentError, "message", "MALFORMED"),
        (b"\x12\x01\xff", InvalidArgumentError, "message", "MALFORMED"),  # a token that is not UTF-8
    ],
    ids=["version", "server", "empty", "garbage", "token"],
)
def test_another_hello_is_refused(payload: LinkHello | bytes, kind: type[KvpoolError], field: str, reason: str) -> None:
    data = payload if isinstance(payload, bytes) else payload.SerializeToString()
    with refused(kind, field=field, reason=reason):
        link.read_hello(data, "steps", "s")


@pytest.mark.parametrize("sent", [LinkHello(), LinkHello(steps=StepsHello()), LinkHello(replication=b"s")], ids=str)
def test_a_listener_takes_links_of_one_stream(sent: LinkHello) -> None:
    with refused(InvalidArgumentError, field="stream", reason="MALFORMED", match="takes links for lending"):
        link.read_hello(sent.SerializeToString(), "lending")


def test_the_error_of_a_refusal_is_read() -> None:
    sent = WrongStateError("OTHER_POOL", "of another pool", field="pool_name")
    found = link.read_refusal(to_status(sent).SerializeToString())
    assert (type(found), found.reason, found.field, str(found)) == (type(sent), sent.reason, sent.field, str(sent))
    assert link.read_refusal(b"\xff").reason == "MALFORMED"


def test_a_welcome_has_the_version_of_the_server() -> None:
    frame = link.welcome(LinkWelcome(replication=b"position"))
    assert frame[HEAD.size - 1] == WELCOME
    assert link.read_welcome(payload_of(frame)).replication == b"position"
    for payload in (b"", b"\xff", LinkWelcome(protocol_version=9).SerializeToString()):
        with refused(ServerError, field="protocol_version", reason="PROTOCOL_VERSION"):
            link.read_welcome(payload)


@pytest.mark.parametrize(
    ("address", "steps"),
    [
        ("unix:/run/kvpool.sock", "unix:/run/kvpool.sock.steps"),
        ("127.0.0.1:50051", "127.0.0.1:50052"),
        ("[::1]:50051", "[::1]:50052"),
        ("node:65534", "node:65535"),
        ("node:65535", ""),
        ("node:0", "node:0"),
    ],
)
def test_steps_are_taken_beside_the_address_of_calls(address: str, steps: str) -> None:
    assert link.steps_address(address) == steps


UNIX, BESIDE, FAR = "unix:/run/a", "unix:/run/a.steps", "unix:/far/steps"


@pytest.mark.parametrize(
    ("addresses", "bound", "reached"),
    [
        ([UNIX], [BESIDE], {UNIX: BESIDE, "unix:/mounted/a": "unix:/mounted/a.steps"}),
        ([UNIX], [FAR], {UNIX: FAR, "unix:/mounted/a": FAR}),
        ([UNIX], ["unix:/run/other"], {"unix:/mounted/a": "unix:/mounted/other"}),
        ([UNIX], [], {UNIX: "", "node:1": ""}),
        ([UNIX], ["127.0.0.1:9"], {UNIX: "", "node:1": "node:9"}),
        (["unix:/x/a", "unix:/y/b"], ["unix:/x/a.steps", "unix:/y/b.steps"], {"unix:/y/b": "unix:/y/b.steps"}),
        (["node:1"], [BESIDE], {UNIX: BESIDE, "node:1": ""}),
        (["node:7", "[::1]:20"], ["node:8", "[::1]:21"], {"node:7": "node:8", "[::1]:20": "[::1]:21"}),
        (["node:7"], ["node:8"], {"forwarded:65535": "forwarded:8", "node:1": "node:8"}),
        (["node:65535", UNIX], [BESIDE], {"node:65535": "", UNIX: BESIDE}),
    ],
    ids=["beside", "far", "folder", "none", "other-kind", "folders", "only-unix", "ports", "forwarded", "last-port"],
)
def test_a_client_is_told_where_it_reaches_the_listener(
    addresses: list[str], bound: list[str], reached: dict[str, str]
) -> None:
    listener = link.step_listener("s", addresses, bound)
    assert listener.server_id == "s"
    assert {called: link.listener_address(listener, called) for called in reached} == reached


def test_only_the_server_with_the_id_proves_it() -> None:
    link.check_proof(link.proof(b"probe", "id"), b"probe", "id")
    for answer in (link.proof(b"probe", "other"), link.proof(b"earlier", "id"), b"probe", b""):
        with refused(UnavailableError, reason=link.OTHER_SERVER):
            link.check_proof(answer, b"probe", "id")
