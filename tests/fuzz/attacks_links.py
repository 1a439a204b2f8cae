"""Attacks on the links of a server: mutated streams of a session that exists, and garbage."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from random import Random
from typing import Final

from fuzz.attacked import Server
from fuzz.mutations import mutate_bytes
from kvpool.client import connect
from kvpool.core.steps.columns import Operation
from kvpool.wire.frames import HEAD
from support.raw_link import request
from support.raw_session import RawSession
from support.server import pool_config

_POOL: Final = "attacked"
_STREAMS: Final = 40
_APART: Final = 40
"""Links that are open together, each with a part of a stream."""


def _stream(session: RawSession) -> list[bytes]:
    """A hello, steps that admit a request and free it, and one that is refused."""
    declared = {"declares": [True], "request_ids": ["r"], "num_appended_tokens": [3]}
    return [
        session.hello(),
        request(1, operations=[Operation.ADMIT], request_numbers=[1], **declared),
        request(2, operations=[Operation.FREE], request_numbers=[1]),
        request(9),
    ]


def _mutated(server: Server) -> None:
    rng = Random(10)
    for _ in range(_STREAMS):
        with _session(server) as session:
            frames = _stream(session)
            at = rng.randrange(len(frames))
            head, payload = frames[at][: HEAD.size], frames[at][HEAD.size :]
            if rng.random() < 0.5:
                payload = mutate_bytes(rng, payload, frames[0])
                frames[at] = HEAD.pack(len(payload), head[-1]) + payload
            else:
                frames[at] = mutate_bytes(rng, head, b"") + payload
            _send(session, b"".join(frames))


def _garbage(server: Server) -> None:
    rng = Random(11)
    with _session(server) as session:
        for size in (1, 4, 5, 100, 100_000):
            _send(session, rng.randbytes(size))
            _send(session, session.hello() + rng.randbytes(size))


def _torn(server: Server) -> None:
    """Links that stay open, each with a part of a stream and nothing after it; and a peer that resets each."""
    with _session(server) as session, contextlib.ExitStack() as stack:
        data = b"".join(_stream(session))
        for at in range(0, len(data), len(data) // _APART):
            stack.callback(session.connect(data[:at]).reset)


def _send(session: RawSession, data: bytes) -> None:
    """Sends bytes on a link of its own, and reads what comes back."""
    with session.connect() as link, contextlib.suppress(OSError):
        link.send(data)
        link.socket.shutdown(socket.SHUT_WR)
        while link.next():
            pass


@contextlib.contextmanager
def _session(server: Server) -> Iterator[RawSession]:
    """A session in a pool of its own, so that what its steps do is not the canary's."""
    with connect(server.address) as client:
        client.create_pool(pool_config(_POOL))
    session = RawSession.open(server.address, _POOL)
    yield session
    session.close()


ATTACKS: Final[dict[str, Callable[[Server], object]]] = {
    "mutated links": _mutated,
    "garbage on links": _garbage,
    "torn links": _torn,
}
