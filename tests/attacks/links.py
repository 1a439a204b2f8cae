"""Attacks on the links of a server: connections without a hello, and sessions that send or read in a hostile way."""

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Final

from attacks.attack import Assault
from attacks.floods import TLS_GREETING, connected, flood
from attacks.memory import bounded_memory
from attacks.target import TENANTS, Target
from kvpool.core.steps.columns import Operation
from kvpool.wire.frames import HEAD
from kvpool.wire.link import Kind
from support.auth import secret_of
from support.raw_link import RawLink, request
from support.raw_session import RawSession
from support.server import pool_config

_POOL: Final = "attacked"
_LINKS: Final = 32
_ROWS: Final = 20
_PROMPT_TOKENS: Final = 1000
_NUM_BLOCKS: Final = _LINKS * _ROWS * _PROMPT_TOKENS // 4 + 1
_STEPS: Final = 20_000
_MESSAGE_BYTES: Final = 2**24
_TURN_SECONDS: Final = 0.05
_PAUSE_SECONDS: Final = 0.002
_AHEAD: Final = 2_000_000


def flood_links(assault: Assault) -> None:
    """Opens links that say nothing, half a TLS greeting, or TLS and then no hello, half of one, or a bad one."""
    with assault.target.connect("attacker") as client:
        client.create_pool(pool_config(_POOL))
    with _session(assault.target) as session:
        host, _, port = session.address.rpartition(":")
        tls = ssl.create_default_context(cafile=assault.target.authority.path)
        hello = session.hello()
        greetings = [
            b"",
            hello[:-1],
            HEAD.pack(2**32 - 1, Kind.HELLO),
            HEAD.pack(2**14, Kind.HELLO) + bytes(2**14),
            request(1),
            *(session.hello(**field) for field in ({"token": ""}, {"server_id": ""}, {"session_id": ""})),
            session.hello(token=secret_of("stranger")),
        ]

        def connect(number: int) -> socket.socket:
            peer = connected(socket.AF_INET, ("127.0.0.1", int(port)), b"" if number % 2 else TLS_GREETING)
            if number % 4 == 1:
                peer.settimeout(1)
                with contextlib.suppress(OSError):
                    peer = tls.wrap_socket(peer, server_hostname=host)
                    peer.sendall(greetings[number // 4 % len(greetings)])
            return peer

        flood(assault, connect)


def step(target: Target) -> None:
    """Opens a session over new connections, and makes a step."""
    with target.connect(TENANTS[1]) as client, client.open_session(TENANTS[0]) as session, session.step():
        pass


def send_no_rest(assault: Assault) -> None:
    """Announces 16 MiB on 32 links and sends 1 KiB of it now and then; opens links again that have ended."""

    def send(link: RawLink) -> Iterator[None]:
        link.send(HEAD.pack(_MESSAGE_BYTES, Kind.REQUEST))
        while True:
            yield
            link.send(bytes(1024))

    _hold(assault, send)


def read_no_answers(assault: Assault) -> None:
    """Sends steps with long answers on 32 links, and reads none; opens links again that have ended."""
    ids, tokens = [*map(str, range(_ROWS))], [_PROMPT_TOKENS] * _ROWS
    admit = {"operations": [Operation.ADMIT] * _ROWS, "declares": [True] * _ROWS}
    admit |= {"request_ids": ids, "num_appended_tokens": tokens}
    free = {"operations": [Operation.FREE] * _ROWS}
    rows = [*range(1, _ROWS + 1)]
    steps = (
        request(number, request_numbers=rows, **(admit if number % 2 else free)) for number in range(1, _STEPS // 10)
    )
    data = b"".join(steps)
    _hold(assault, lambda link: _sending(link, data))


def send_far_ahead(assault: Assault) -> None:
    """Sends small steps on 32 links as fast as the server takes them, and reads the answers when it takes no more."""
    data = b"".join(map(request, range(1, _STEPS))) + request(1) * _AHEAD

    def send(link: RawLink) -> Iterator[None]:
        for _ in _sending(link, data):
            yield
            with contextlib.suppress(TimeoutError):
                assert link.socket.recv(2**20), "the server ended the link"

    _hold(assault, send)


def _sending(link: RawLink, data: bytes) -> Iterator[None]:
    """Sends what the server takes; each time, until it takes no more for a while."""
    link.socket.settimeout(_TURN_SECONDS)
    left = memoryview(data)
    while True:
        yield
        with contextlib.suppress(TimeoutError):
            while left:
                left = left[link.socket.send(left) :]


def _hold(assault: Assault, send: Callable[[RawLink], Iterator[None]]) -> None:
    """Gives links their turns; one that has ended begins again. Memory is bounded while they are open."""

    def held() -> Iterator[None]:
        with _session(assault.target) as session, session.greeted() as link:
            yield from send(link)

    with assault.target.connect("attacker") as client:
        client.create_pool(pool_config(_POOL, _NUM_BLOCKS, enable_caching=False))
    links: dict[int, Iterator[None]] = {}
    with bounded_memory(assault.target):
        for number in cycle(range(_LINKS)):
            if assault.is_over.wait(_PAUSE_SECONDS):
                break
            try:
                next(links[number])
            except (KeyError, OSError, AssertionError):  # the server has ended the link
                links[number] = held()


@contextlib.contextmanager
def _session(target: Target) -> Iterator[RawSession]:
    session = RawSession.open(target.address, _POOL, secret_of("attacker"), target.authority.trusted_by())
    try:
        yield session
    finally:
        session.close()
