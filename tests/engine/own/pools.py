"""Pools of a test: each scheduler and each manager that it makes has one of its own."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvpool.client.admin import AdminClient
from kvpool.client.connection import Client, connect
from kvpool.client.session import Session
from kvpool.core.specs.pool_config import PoolConfig

DEADLINE_SECONDS: Final = 60
_sessions: Final[list[Session]] = []
_uses: Final[list[str]] = []
_numbers: Final = itertools.count()


@dataclass(frozen=True, slots=True)
class Server:
    """The server of all tests of this process."""

    address: str
    client: Client
    admin: AdminClient


_server: Server | None = None


@contextmanager
def served_at(address: str) -> Iterator[None]:
    """Lets pools be made on a server."""
    global _server  # noqa: PLW0603 - vLLM's classes, which tests make, have no other way to it
    with (
        connect(address, deadline_seconds=DEADLINE_SECONDS) as client,
        AdminClient(address, deadline_seconds=DEADLINE_SECONDS) as admin,
    ):
        _server = Server(address, client, admin)
        yield
    _server = None


def server() -> Server:
    """Returns the server."""
    assert _server, "no server was started"
    return _server


def new_name() -> str:
    """Names a pool."""
    name = f"own-{os.getpid()}-{next(_numbers)}"
    note_use(name)
    return name


def note_use(of: str) -> None:
    """Records the name of a pool or function of kvpool that a test uses."""
    _uses.append(of)


def take_uses() -> list[str]:
    """Returns what was noted since the last call."""
    taken = _uses.copy()
    _uses.clear()
    return taken


def open_session(config: PoolConfig) -> Session:
    """Creates a pool, and opens a session in it."""
    server().client.create_pool(config)
    session = server().client.open_session(config.name, memory_id=config.name)
    close_later(session)
    return session


def close_later(session: Session) -> None:
    """Leaves a session to `close_all`."""
    _sessions.append(session)


def close_all() -> None:
    """Ends all sessions, and removes their pools."""
    while _sessions:
        session = _sessions.pop()
        session.close()
        server().admin.remove_pool(session.config.name)
