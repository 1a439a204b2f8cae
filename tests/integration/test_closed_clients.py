"""Use of a client after it was closed, also by a call in progress, raises WrongStateError."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpool.client import Client, KvpoolError, WrongStateError, aio, connect
from kvpool.client.admin import AdminClient
from support.server import pool_config, running_server, server_process
from support.waiting import DEADLINE_SECONDS

EMBEDDED = "embedded:"


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with running_server() as address:
        yield address


@pytest.fixture(params=["server", EMBEDDED])
def address(request: pytest.FixtureRequest, served: str) -> str:
    return served if request.param == "server" else EMBEDDED


def is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(WrongStateError) as caught:
        call()
    assert caught.value.reason == "CLOSED"
    assert "connect()" in str(caught.value)


def test_a_closed_client_refuses_every_call(address: str, pool_name: str) -> None:
    config = pool_config(pool_name, enable_events=True)
    client = connect(address)
    client.create_pool(config)
    session = client.open_session(pool_name)
    request = session.request("r", range(5))
    session.admit(request)
    watch = client.watch(pool_name, from_sequence=1, snapshot=False)
    next(watch)
    client.close()
    client.close()

    def decode() -> None:
        with session.step() as step:
            step.decode([request], [7])

    for call in (
        decode,
        lambda: session.free(request),
        session.mark_executed,
        session.pool,
        session.close,
        lambda: client.create_pool(config),
        lambda: client.get_pool(pool_name),
        lambda: client.wait_until_ready(pool_name, timeout_seconds=0),
        lambda: client.open_session(pool_name),
        lambda: client.watch(pool_name),
        lambda: next(watch),
    ):
        is_refused(call)


def test_a_closed_client_for_asyncio_refuses_every_call(address: str, pool_name: str) -> None:
    async def main() -> None:
        client = aio.connect(address)
        await client.create_pool(pool_config(pool_name, enable_events=True))
        session = await client.open_session(pool_name)
        request = session.request("r", range(5))
        await session.admit(request)
        watch = client.watch(pool_name, from_sequence=1)
        await anext(watch)
        await client.close()
        await client.close()
        for call in (
            lambda: session.free(request),
            session.mark_executed,
            session.pool,
            session.close,
            lambda: client.get_pool(pool_name),
            lambda: client.wait_until_ready(pool_name, timeout_seconds=0),
            lambda: client.open_session(pool_name),
            lambda: anext(client.watch(pool_name)),
            lambda: anext(watch),
        ):
            with pytest.raises(WrongStateError) as caught:
                await call()
            assert caught.value.reason == "CLOSED"

    asyncio.run(main())


def test_a_closed_client_of_operators_refuses_every_call(served: str) -> None:
    admin = AdminClient(served)
    admin.overview()
    admin.close()
    admin.close()
    is_refused(admin.overview)
    is_refused(lambda: list(admin.sessions()))


def waits(client: Client, name: str, started: threading.Event) -> list[Callable[[], object]]:
    def wait() -> object:
        started.set()
        return client.wait_until_ready(name, timeout_seconds=DEADLINE_SECONDS)

    def watch() -> object:
        batches = client.watch(name, snapshot=True)
        while next(batches).kind.value != "snapshot_end":
            pass
        started.set()
        return next(batches)

    return [wait, watch]


@pytest.mark.parametrize("which", [0, 1], ids=["wait_until_ready", "watch"])
def test_closing_a_client_ends_its_calls_in_progress(served: str, pool_name: str, which: int) -> None:
    client, started, errors = connect(served), threading.Event(), list[KvpoolError]()
    if which:
        client.create_pool(pool_config(pool_name, enable_events=True))
    call = waits(client, pool_name, started)[which]

    def run() -> None:
        try:
            call()
        except KvpoolError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    client.close()
    thread.join(DEADLINE_SECONDS)
    assert [(type(error), error.reason) for error in errors] == [(WrongStateError, "CLOSED")]


@pytest.mark.parametrize("which", [0, 1], ids=["wait_until_ready", "watch"])
def test_closing_a_client_for_asyncio_ends_its_calls_in_progress(served: str, pool_name: str, which: int) -> None:
    async def main() -> None:
        client, started = aio.connect(served), asyncio.Event()

        async def wait() -> object:
            started.set()
            return await client.wait_until_ready(pool_name, timeout_seconds=DEADLINE_SECONDS)

        async def watch() -> object:
            batches = client.watch(pool_name, snapshot=True)
            while (await anext(batches)).kind.value != "snapshot_end":
                pass
            started.set()
            return await anext(batches)

        if which:
            await client.create_pool(pool_config(pool_name, enable_events=True))
        task = asyncio.create_task(watch() if which else wait())
        await started.wait()
        await client.close()
        with pytest.raises(WrongStateError) as caught:
            await asyncio.wait_for(task, DEADLINE_SECONDS)
        assert caught.value.reason == "CLOSED"

    asyncio.run(main())


def test_closing_a_client_ends_its_step_in_progress() -> None:
    with server_process() as server:
        client, started = connect(server.addresses[0]), threading.Event()
        client.create_pool(pool_config())
        session = client.open_session("m")

        def step() -> None:
            started.set()
            session.admit(session.request("r", range(5)))

        server.pause()
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(step)
            started.wait()
            client.close()
            with pytest.raises(WrongStateError) as caught:
                answer.result(DEADLINE_SECONDS)
        server.resume()
    assert caught.value.reason == "CLOSED"


async def test_closing_a_client_for_asyncio_ends_its_step_in_progress() -> None:
    with server_process() as server:
        client = aio.connect(server.addresses[0])
        await client.create_pool(pool_config())
        session = await client.open_session("m")
        server.pause()
        step = asyncio.create_task(session.admit(session.request("r", range(5))))
        await asyncio.sleep(0)  # until it waits for the answer
        await client.close()
        with pytest.raises(WrongStateError) as caught:
            await asyncio.wait_for(step, DEADLINE_SECONDS)
        server.resume()
    assert caught.value.reason == "CLOSED"


def test_a_step_that_was_sent_before_its_client_was_closed_has_no_known_result(served: str, pool_name: str) -> None:
    client = connect(served)
    client.create_pool(pool_config(pool_name))
    session = client.open_session(pool_name)
    with session.begin_step() as step:
        answer = step.admit(session.request("r", range(5)))
    client.close()
    for _ in range(2):
        is_refused(session.settle)
    assert answer.outcome is None
