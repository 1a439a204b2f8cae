"""The asyncio client has the features of the synchronous one, the core in this process included."""

import asyncio
import inspect
from collections.abc import AsyncIterator

import pytest

from kvpool.client import (
    Admission,
    BlockStored,
    Client,
    Outcome,
    Session,
    WrongStateError,
    aio,
    connect,
)
from kvpool.client.aio import AsyncClient, AsyncSession
from support.server import pool_config, running_server

PROMPT = list(range(41))


@pytest.fixture(params=["embedded", "served"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[AsyncClient]:
    if request.param == "embedded":
        async with aio.connect("embedded:") as client:
            yield client
    else:
        with running_server() as address:
            async with aio.connect(address) as client:
                yield client


async def test_a_session_is_closed_at_the_end_of_a_block(client: AsyncClient) -> None:
    await client.create_pool(pool_config())
    async with client.open_session("m") as session:
        assert await session.admit(session.request("r", PROMPT))
        assert (await client.get_pool("m")).sessions == 1
    assert (await client.get_pool("m")).sessions == 0
    async with await asyncio.create_task(client.open_session("m")) as session:
        assert session.session_number == 2
    assert (await client.get_pool("m")).sessions == 0


@pytest.mark.parametrize(("blocking", "asyncio"), [(Client, AsyncClient), (Session, AsyncSession)])
def test_both_clients_have_the_same_methods_and_parameters(blocking: type, asyncio: type) -> None:
    names = {name for name in dir(blocking) if not name.startswith("_")}
    assert names == {name for name in dir(asyncio) if not name.startswith("_")}
    for name in names:
        if inspect.isfunction(getattr(blocking, name)):
            parameters = [inspect.signature(getattr(kind, name)).parameters for kind in (blocking, asyncio)]
            assert parameters[0] == parameters[1], name


async def test_decodes_with_a_reserve_wait_for_no_answer(client: AsyncClient) -> None:
    await client.create_pool(pool_config())
    async with client.open_session("m", reserve_tokens=16) as session:
        request, done = session.request("a", PROMPT), session.request("b", PROMPT)
        assert await session.admit(request)
        assert await session.admit(done)
        async with session.step() as step:
            step.free(done)
        assert done.num_computed_tokens == 41  # not answered yet
        for i in range(20):
            async with session.step() as step:
                step.decode([request], [i])
            assert not step.waits
        await session.settle()
        assert (request.num_computed_tokens, done.num_computed_tokens) == (61, 0)
        assert await session.admit(session.request("c", PROMPT))


async def test_a_begun_step_is_answered_when_it_is_settled(client: AsyncClient) -> None:
    await client.create_pool(pool_config())
    async with await client.open_session("m") as session:
        request = session.request("a", PROMPT)
        async with session.begin_step() as step:
            admitted = step.admit(request)
        assert (admitted.outcome, session.sequence) == (None, 0)
        with pytest.raises(WrongStateError, match="settle"):
            await session.free(request)
        await session.settle()
        await session.settle()  # does nothing
        assert (admitted.outcome, session.sequence, request.num_computed_tokens) == (Outcome.OK, 1, 41)
        assert (await client.get_pool("m")).activity.retries == 0
        for token_id in range(60):
            async with session.begin_step(executed_sequence=session.sequence) as step:
                decoded = step.decode([request])
            request.append([token_id])
            await session.settle()
            assert decoded.is_answered
        assert request.num_computed_tokens == 101


async def test_pools_are_watched_and_waited_for(client: AsyncClient) -> None:
    await client.create_pool(pool_config(enable_events=True))
    assert (await client.wait_until_ready("m", timeout_seconds=5.0)).config.name == "m"
    session = await client.open_session("m")
    request = session.request("a", PROMPT)
    await session.admit(request)
    await session.free(request)
    watch = client.watch("m", from_sequence=1)
    batch = await anext(watch)
    await watch.aclose()
    assert isinstance(batch.events[0], BlockStored)
    assert (await session.pool()).free_blocks == 99
    await session.close()


def test_the_signature_of_an_operation_names_its_own_result() -> None:
    for kind in (Session, AsyncSession):
        assert inspect.signature(kind.admit).return_annotation == Admission | None
        assert inspect.signature(kind.free).return_annotation is None


async def test_an_error_in_a_with_block_is_not_replaced_by_one_of_closing(client: AsyncClient) -> None:
    await client.create_pool(pool_config())
    session = await client.open_session("m")
    await client.close()
    with pytest.raises(ValueError, match="my own"):
        async with session:
            raise ValueError("my own")
    with pytest.raises(WrongStateError, match="the client was closed"):
        async with session:
            pass


def test_an_error_in_a_with_block_of_a_synchronous_session_is_not_replaced_either() -> None:
    client = connect("embedded:")
    client.create_pool(pool_config())
    session = client.open_session("m")
    client.close()
    with pytest.raises(ValueError, match="my own"), session:
        raise ValueError("my own")
    with pytest.raises(WrongStateError, match="the client was closed"), session:
        pass
