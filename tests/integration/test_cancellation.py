"""asyncio: a call cancelled at any await leaves a usable session, or one that reports that it is unsettled."""

import asyncio
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import Client, Request, WrongStateError, aio, connect
from kvpool.client.aio import AsyncClient, AsyncSession
from support.proxy import Fault, Proxy
from support.server import pool_config, running_server
from support.waiting import DEADLINE_SECONDS

PROMPT = list(range(41))
MOST_AWAITS = 100


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server(max_pools=10_000, leases={"min_lease_seconds": 0.5}) as address:
        yield address


@pytest.fixture
def direct(address: str) -> Iterator[Client]:
    with connect(address) as client:
        yield client


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncClient]:
    async with aio.connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        yield client


@types.coroutine
def cancelled_at(call: Coroutine[Any, Any, object], count: int) -> Generator[Any, Any, object]:
    """Runs a coroutine and cancels its task at its `count`th wait, from 0."""
    resume: Callable[[Any], Any] = call.send
    value: Any = None
    for waits in range(10_000):
        try:
            waited = resume(value)
        except StopIteration as stop:
            return stop.value
        if waits == count:
            task = asyncio.current_task()
            assert task
            task.cancel()
        try:
            value = yield waited
            resume = call.send
        except BaseException as error:  # noqa: BLE001 - passed on to who waits
            value, resume = error, call.throw
    raise AssertionError("never ends")


async def was_cancelled(call: Coroutine[Any, Any, object], count: int) -> bool:
    """Whether the call was cancelled before it ended."""

    async def run() -> object:
        return await cancelled_at(call, count)

    try:
        await asyncio.create_task(run())
    except asyncio.CancelledError:
        return True
    return False


class Scene:
    """A session in its own pool."""

    def __init__(self, client: AsyncClient, direct: Client, name: str) -> None:
        self.client = client
        self.direct = direct
        self.name = name
        direct.create_pool(pool_config(name))

    async def open(self) -> tuple[AsyncSession, Request]:
        session = await self.client.open_session(self.name)
        return session, session.request("r", PROMPT)

    async def end(self, session: AsyncSession, request: Request, *, steps: int) -> None:
        """Frees the request and closes the session. Every change was made once."""
        try:
            await session.free(request)
        except WrongStateError as error:
            assert error.reason == "UNSETTLED"  # noqa: PT017 - either will do
            await session.settle()
            assert request.block_ids == [list(range(1, 12))]
            await session.free(request)
        await session.close()
        info = self.direct.get_pool(self.name)
        assert (info.free_blocks, info.sessions, info.activity.steps) == (99, 0, steps)
        assert info.activity.sessions_closed == info.activity.sessions_opened


async def cancel_step(scene: Scene, count: int) -> bool:
    session, request = await scene.open()
    cancelled = await was_cancelled(session.admit(request), count)
    await scene.end(session, request, steps=2)
    return cancelled


async def cancel_settle(scene: Scene, count: int) -> bool:
    session, request = await scene.open()
    assert await was_cancelled(session.admit(request), 0)
    cancelled = await was_cancelled(session.settle(), count)
    await scene.end(session, request, steps=2)
    return cancelled


async def cancel_mark_executed(scene: Scene, count: int) -> bool:
    session, request = await scene.open()
    await session.admit(request)
    cancelled = await was_cancelled(session.mark_executed(), count)
    await session.mark_executed()
    await scene.end(session, request, steps=2)
    return cancelled


async def cancel_pool(scene: Scene, count: int) -> bool:
    session, request = await scene.open()
    await session.admit(request)
    cancelled = await was_cancelled(session.pool(), count)
    await scene.end(session, request, steps=2)
    return cancelled


async def cancel_close(scene: Scene, count: int) -> bool:
    session, request = await scene.open()
    await session.admit(request)
    cancelled = await was_cancelled(session.close(), count)
    await session.close()
    info = scene.direct.get_pool(scene.name)
    assert (info.free_blocks, info.activity.sessions_closed, info.activity.leases_expired) == (99, 1, 0)
    return cancelled


async def cancel_open(scene: Scene, count: int) -> bool:
    cancelled = await was_cancelled(scene.client.open_session(scene.name, lease_seconds=0.5), count)
    async with asyncio.timeout(DEADLINE_SECONDS):  # a session that it may have left ends with its lease
        while scene.direct.get_pool(scene.name).sessions and cancelled:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)
    return cancelled


@pytest.mark.parametrize(
    "attempt",
    [cancel_step, cancel_settle, cancel_mark_executed, cancel_pool, cancel_close, cancel_open],
    ids=lambda attempt: attempt.__name__,
)
async def test_cancelled_at_any_await(
    attempt: Callable[[Scene, int], Coroutine[Any, Any, bool]], client: AsyncClient, direct: Client
) -> None:
    cancelled = 0
    while await attempt(Scene(client, direct, f"{attempt.__name__}-{cancelled}"), cancelled):
        cancelled += 1
        assert cancelled < MOST_AWAITS
    assert cancelled > 0


async def test_cancelled_during_a_retry(address: str, direct: Client, tmp_path: Path) -> None:
    """The connection breaks during the step; the call is cancelled in the pauses and while it reconnects."""
    ended = 0
    for count in range(MOST_AWAITS):
        proxy = Proxy(tmp_path / str(count), address, Fault.CUT)
        async with proxy.running(), aio.connect(proxy.address, deadline_seconds=DEADLINE_SECONDS) as client:
            scene = Scene(client, direct, f"again-{count}")
            session, request = await scene.open()
            num_before = len(proxy.links)
            proxy.strike_next()
            cancelled = await was_cancelled(session.admit(request), count)
            num_links = len(proxy.links)
            await scene.end(session, request, steps=2)
        if not cancelled:
            ended += 1
            assert num_links > num_before, "it was sent again, on another connection"
        if ended == 3:  # the number of waits varies
            break
    assert not cancelled
    assert count > 2
