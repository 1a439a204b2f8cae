"""The server's side of links, with real sockets: what it refuses and ends, and that others are served meanwhile."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from kvpool.client import connect
from kvpool.client.admin import AdminClient
from kvpool.core.errors import (
    AbortedError,
    DeniedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from kvpool.core.steps.columns import Operation
from kvpool.server.services.step_links import MAX_STRANGERS
from kvpool.v1 import link_pb2
from kvpool.wire.frames import HEAD, encode_frame
from kvpool.wire.link import MAX_GREETING_BYTES, Kind
from support.auth import Authority, Entry, secret_of, write_tokens
from support.raw_link import RawLink, request
from support.raw_session import RawSession
from support.server import pool_config, server_process
from support.waiting import wait_until

STALL_SECONDS: Final = 0.3
MAX_BYTES: Final = 64 * 1024
FOREVER: Final = {"stall_seconds": 3600.0}
TOKENS: Final[list[Entry]] = [
    *({"name": name, "role": "scheduler", "pools": ["*"]} for name in ("ours", "others")),
    {"name": "watcher", "role": "watcher", "pools": ["*"]},
    {"name": "operator", "role": "admin", "pools": ["*"]},
    {"name": "old", "role": "scheduler", "pools": ["*"], "expires": "2020-01-01"},
]


@dataclass(frozen=True)
class House:
    """A server with a pool `m`."""

    server: Any
    address: str
    access: dict[str, Any]

    def session(self) -> RawSession:
        """Opens a session of `ours`."""
        return RawSession.open(self.address, **self.access)

    def operator(self) -> AdminClient:
        return AdminClient(self.address, **({**self.access, "token": secret_of("operator")} if self.access else {}))

    def state(self) -> list[object]:
        """What the server knows of its pool and sessions, except times."""
        with self.operator() as admin:
            sessions = [(info.session_number, info.sequence, info.requests) for info in admin.sessions()]
            return [*admin.overview().pools, *sessions]


@contextlib.contextmanager
def serving(*addresses: str, access: dict[str, Any] | None = None, **settings: object) -> Iterator[House]:
    with server_process(*addresses, **settings) as server:
        house = House(server, server.addresses[0], access or {})
        with connect(house.address, **house.access) as client:
            client.create_pool(pool_config())
        yield house


@pytest.fixture(scope="module", params=["unix", "tcp", "tls"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    settings: dict[str, Any] = {"limits": FOREVER, "max_message_bytes": MAX_BYTES}
    if request.param != "tls":
        addresses = [] if request.param == "unix" else ["127.0.0.1:0"]
        with serving(*addresses, **settings) as house:
            yield house
        return
    write_tokens(folder / "tokens.toml", TOKENS)
    authority = Authority(folder, "ca")
    pair = authority.issue("127.0.0.1")
    auth = {"tokens": str(folder / "tokens.toml"), "tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    access = {"token": secret_of("ours"), "tls": authority.trusted_by()}
    with serving("127.0.0.1:0", access=access, auth=auth, **settings) as house:
        yield house
        assert not any(secret_of(entry["name"]) in house.server.log for entry in TOKENS)


def test_steps_that_are_sent_ahead_are_answered_in_order(house: House) -> None:
    session, count = house.session(), 1000
    with session.connect(session.hello() + b"".join(map(request, range(1, count + 1)))) as link:
        link.welcome()
        answers = [link.answer() for _ in range(count)]
    assert [answer.sequence for answer in answers] == [*range(1, count + 1)]
    assert [answer.protocol_version > 0 for answer in answers] == [True, *[False] * (count - 1)]


def of_version_9(session: RawSession) -> link_pb2.LinkHello:
    steps = link_pb2.StepsHello(server_id=session.server_id, session_id=session.session_id)
    return link_pb2.LinkHello(protocol_version=9, steps=steps)


@pytest.mark.parametrize(
    ("first_bytes", "kind", "reason"),
    [
        (lambda one: one.hello(session_id="none"), NotFoundError, "SESSION_NOT_FOUND"),
        (lambda one: one.hello(session_id=""), NotFoundError, "SESSION_NOT_FOUND"),
        (lambda one: one.hello(server_id="another"), UnavailableError, "OTHER_SERVER"),
        (lambda _: encode_frame(Kind.HELLO, b""), UnavailableError, "OTHER_SERVER"),
        (lambda _: encode_frame(Kind.HELLO, b"\xff"), InvalidArgumentError, "MALFORMED"),
        (
            lambda one: encode_frame(Kind.HELLO, of_version_9(one).SerializeToString()),
            WrongStateError,
            "PROTOCOL_VERSION",
        ),
        (lambda _: request(1), InvalidArgumentError, "MALFORMED"),
        (lambda _: HEAD.pack(MAX_GREETING_BYTES + 1, Kind.HELLO), ExhaustedError, "MESSAGE_TOO_LARGE"),
        (lambda _: b"PRI * HTTP/2.0\r\n\r\n", InvalidArgumentError, "MALFORMED"),
    ],
    ids=["session", "no-session", "server", "empty", "garbage", "version", "request", "large", "http"],
)
def test_a_bad_hello_is_refused_and_changes_nothing(
    house: House, first_bytes: Callable[[RawSession], bytes], kind: type[KvpoolError], reason: str
) -> None:
    session = house.session()
    before = house.state()
    with session.connect(first_bytes(session)) as link:
        error = link.refusal()
    assert (type(error), error.reason) == (kind, reason)
    assert house.state() == before


@pytest.mark.parametrize(
    ("frame", "kind", "reason"),
    [
        (encode_frame(Kind.HELLO, b""), InvalidArgumentError, "MALFORMED"),
        (encode_frame(Kind.ANSWER, b""), InvalidArgumentError, "MALFORMED"),
        (encode_frame(255, b""), InvalidArgumentError, "MALFORMED"),
        (encode_frame(Kind.REQUEST, b"\xff"), InvalidArgumentError, "MALFORMED"),
        (request(1, session_id="another"), InvalidArgumentError, "INVALID_VALUE"),
        (request(3), WrongStateError, "SEQUENCE_GAP"),
        (HEAD.pack(MAX_BYTES + 1, Kind.REQUEST), ExhaustedError, "MESSAGE_TOO_LARGE"),
        (HEAD.pack(2**32 - 1, Kind.REQUEST), ExhaustedError, "MESSAGE_TOO_LARGE"),
        (HEAD.pack(MAX_BYTES + 1, Kind.REQUEST) + bytes(MAX_BYTES), ExhaustedError, "MESSAGE_TOO_LARGE"),
    ],
    ids=["hello", "answer", "unknown", "garbage", "session", "sequence", "large", "4-GiB", "flood"],
)
def test_a_bad_frame_ends_the_link_and_changes_nothing(
    house: House, frame: bytes, kind: type[KvpoolError], reason: str
) -> None:
    session = house.session()
    before = house.state()
    with session.greeted() as link:
        with contextlib.suppress(OSError):  # the server may have ended the link before it has all
            link.send(frame)
        error = link.refusal()
    assert (type(error), error.reason) == (kind, reason)
    assert house.state() == before
    with session.greeted() as link:
        link.send(request(1))
        assert link.answer().sequence == 1, "the session continues"


def test_an_evicted_session_loses_its_link(house: House) -> None:
    with house.session().greeted() as link, house.operator() as admin:
        admin.evict_session("m", max(info.session_number for info in admin.sessions()))
        error = link.refusal()
    assert (type(error), error.reason) == (AbortedError, "SESSION_EVICTED")


def test_a_second_link_of_a_session_supersedes_the_first(house: House) -> None:
    session = house.session()
    with session.greeted() as first, session.greeted() as second:
        error = first.refusal()
        assert (type(error), error.reason) == (AbortedError, "STREAM_SUPERSEDED")
        second.send(request(1))
        assert second.answer().sequence == 1


@pytest.mark.parametrize("ends", [RawLink.close, RawLink.reset, RawLink.close_write])
def test_a_link_that_its_client_ends_leaves_the_session(house: House, ends: Callable[[RawLink], None]) -> None:
    session = house.session()
    for part in (b"", request(1)[:6]):
        with session.greeted() as link:
            link.send(part)
            ends(link)
    with session.greeted() as link:
        link.send(request(1))
        assert link.answer().sequence == 1


@pytest.mark.parametrize(
    ("token", "kind", "reason"),
    [
        ("", UnauthenticatedError, "NO_TOKEN"),
        ("kvp_guess", UnauthenticatedError, "UNKNOWN_TOKEN"),
        ("\u202e\0", UnauthenticatedError, "UNKNOWN_TOKEN"),
        (secret_of("old"), UnauthenticatedError, "TOKEN_EXPIRED"),
        (secret_of("others"), DeniedError, "SESSION"),
        (secret_of("operator"), DeniedError, "SESSION"),
        (secret_of("watcher"), DeniedError, "ROLE"),
    ],
    ids=["none", "guess", "text", "old", "others", "operator", "watcher"],
)
@pytest.mark.parametrize("house", ["tls"], indirect=True)
def test_another_token_is_refused_and_changes_nothing(
    house: House, token: str, kind: type[KvpoolError], reason: str
) -> None:
    session = house.session()
    before = house.state()
    with session.connect(session.hello(token=token) + request(1)) as link:
        error = link.refusal()
    assert (type(error), error.reason) == (kind, reason)
    assert house.state() == before


def test_a_link_ends_with_its_token(tmp_path: Path) -> None:
    tokens, (ours, *others) = tmp_path / "tokens.toml", TOKENS
    write_tokens(tokens, TOKENS)
    with serving(access={"token": secret_of("ours")}, auth={"tokens": str(tokens)}, limits=FOREVER) as house:
        session = house.session()
        for entries, kind, reason in (
            ([{**ours, "pools": ["m"]}, *others], UnavailableError, "TOKEN_CHANGED"),
            (others, UnauthenticatedError, "TOKEN_REVOKED"),
        ):
            with session.greeted() as link:
                write_tokens(tokens, entries)
                error = link.refusal()
            assert (type(error), error.reason) == (kind, reason)
        assert house.state()[1:] == [(1, 0, 0)], "the session lives on for its lease"


@pytest.mark.parametrize("said", [b"", HEAD.pack(100, Kind.HELLO), b"\0"], ids=["nothing", "head", "byte"])
def test_a_hello_that_never_comes_ends_the_connection(said: bytes) -> None:
    with serving(limits={"stall_seconds": STALL_SECONDS}) as house, house.session().connect(said) as link:
        assert link.next() is None


def test_half_a_frame_that_never_ends_is_refused_and_an_idle_link_is_not() -> None:
    with serving(limits={"stall_seconds": STALL_SECONDS}) as house:
        idle, session = house.session(), house.session()
        with idle.greeted() as idle_link:
            for part in (request(2)[:1], request(2)[:-1], HEAD.pack(2**20, Kind.REQUEST) + bytes(2**19)):
                with session.greeted() as link:
                    link.send(part)
                    error = link.refusal()
                assert (type(error), error.reason) == (ExhaustedError, "NOTHING_SENT")
            idle_link.send(request(1))
            assert idle_link.answer().sequence == 1


def test_connections_without_a_hello_end_the_oldest_of_them() -> None:
    num_more = 20
    with serving(limits=FOREVER) as house, contextlib.ExitStack() as stack:
        session, newcomer = house.session(), house.session()
        link = stack.enter_context(session.greeted())
        strangers = [stack.enter_context(session.connect(session.hello()[:1])) for _ in range(MAX_STRANGERS + num_more)]
        for stranger in strangers[:num_more]:
            assert stranger.next() is None
        link.send(request(1))
        assert link.answer().sequence == 1
        with newcomer.connect() as last:  # ends one more
            assert strangers[num_more].next() is None
            last.send(newcomer.hello())
            last.welcome()
        strangers[-1].send(session.hello()[1:])
        strangers[-1].welcome()


def test_a_client_that_reads_no_answers_loses_its_link() -> None:
    count, num_steps = 50, 100
    numbers, ids = [*range(1, count + 1)], [*map(str, range(count))]
    admit = {
        "operations": [Operation.ADMIT] * count,
        "declares": [True] * count,
        "request_ids": ids,
        "num_appended_tokens": [1000] * count,
    }
    free = {"operations": [Operation.FREE] * count}
    with serving(limits={"stall_seconds": STALL_SECONDS}) as house, connect(house.address) as client:
        client.create_pool(pool_config("large", 1 + 250 * count, enable_caching=False))
        session = RawSession.open(house.address, "large")
        with session.greeted() as link:
            with contextlib.suppress(OSError):  # the server may have ended the link before
                for sequence in range(1, num_steps + 1):
                    link.send(request(sequence, request_numbers=numbers, **(admit if sequence % 2 else free)))
            link.wait_ended()
            kinds = [kind for kind, _ in iter(link.next, None)]
        assert 0 < kinds.count(Kind.ANSWER) < num_steps, "the server kept the steps that it had not answered"
        assert kinds[-1] in (Kind.ANSWER, Kind.REFUSED), "it waits for its refusal to be read, but not long"


def test_a_server_that_stops_ends_all_links() -> None:
    with serving(limits=FOREVER) as house, house.session().greeted() as link, house.session().connect() as stranger:
        house.server.stop_cleanly()
        error = link.refusal()
        assert (type(error), error.reason) == (UnavailableError, "DRAINING")
        assert stranger.next() is None


def is_taken(session: RawSession) -> bool:
    with session.connect() as link, contextlib.suppress(OSError):
        link.send(session.hello())
        return link.next() is not None
    return False


def test_links_beyond_the_maximum_are_closed() -> None:
    with serving("127.0.0.1:0", limits={**FOREVER, "max_connections": 3}) as house:
        sessions = [house.session() for _ in range(4)]
        links = [session.greeted() for session in sessions[:3]]
        with sessions[3].connect() as refused:
            assert refused.next() is None
        links.pop().close()
        wait_until(lambda: is_taken(sessions[3]), "there is room for another link")
        for link in links:
            link.send(request(1))
            assert link.answer().sequence == 1
            link.close()


def test_a_session_of_an_earlier_server_is_told_to_ask_again() -> None:
    with serving("127.0.0.1:0") as house, serving() as other:
        stale = replace(house.session(), address=other.session().address)
        with stale.connect(stale.hello()) as link:
            assert link.refusal().reason == "OTHER_SERVER"
