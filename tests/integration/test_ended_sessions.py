"""A client keeps nothing of an ended session."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool.client import AbortedError, Client, Session, aio
from kvpool.client.admin import AdminClient
from support.server import running_server
from support.waiting import DEADLINE_SECONDS, wait_until


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server() as address:
        yield address


def keepers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kvpool-keepalive"}


def evicted(address: str, client: Client, pool: str) -> tuple[Session, threading.Thread]:
    """A session that an operator has evicted, and the thread that renewed its lease."""
    before = keepers()
    session = client.open_session(pool, lease_seconds=3.0)
    (keeper,) = keepers() - before
    with AdminClient(address) as admin:
        admin.evict_session(pool, session.session_number)
    return session, keeper


def step(session: Session) -> None:
    session.admit(session.request("r", [1, 2, 3]))


def mark(session: Session) -> None:
    session.mark_executed(0)


def wait(session: Session) -> None:
    """Waits until the renewal of the lease has detected the end."""
    heard = threading.Event()
    timer: Any = session._lease_timer
    while timer.left_seconds > 0:
        heard.wait(0.01)
    step(session)


@pytest.mark.parametrize("ask", [step, mark, wait, Session.close])
def test_nothing_of_an_ended_session_is_kept(
    address: str, client: Client, pool: str, ask: Callable[[Session], None]
) -> None:
    session, keeper = evicted(address, client, pool)
    for _ in range(2):
        with pytest.raises(AbortedError) as caught:
            ask(session)
        assert caught.value.reason == "SESSION_EVICTED"
    transport: Any = session._transport
    assert not transport.streams
    keeper.join(timeout=DEADLINE_SECONDS)
    assert not keeper.is_alive()
    with pytest.raises(AbortedError):
        session.close()


def test_an_ended_session_has_no_thread(address: str, client: Client, pool: str) -> None:
    session, keeper = evicted(address, client, pool)
    keeper.join(timeout=DEADLINE_SECONDS)
    assert not keeper.is_alive()
    assert session.lease_left_seconds == 0


async def test_an_asyncio_session_whose_client_was_closed_keeps_no_task(address: str, pool: str) -> None:
    async with aio.connect(address) as other:
        session = await other.open_session(pool, lease_seconds=3.0)
        calls: Any = session._calls
        keeper = calls._keepalive
    await asyncio.wait([keeper], timeout=DEADLINE_SECONDS)
    assert keeper.done()
    assert keeper.cancelled() or keeper.exception() is None


@pytest.mark.parametrize("has_stream", [False, True])
def test_a_client_learns_that_its_session_has_ended_long_before_its_lease_is_over(
    address: str, client: Client, pool: str, *, has_stream: bool
) -> None:
    session = client.open_session(pool, lease_seconds=25 * DEADLINE_SECONDS)
    if has_stream:
        step(session)
    with AdminClient(address) as admin:
        admin.evict_session(pool, session.session_number)
    wait_until(lambda: session.has_ended)
