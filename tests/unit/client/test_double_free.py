"""A request that was freed cannot be freed again, until it is admitted again."""

import asyncio

import pytest

from kvpool.client import NotFoundError, aio, connect
from support.server import pool_config, running_server

MESSAGE = "'r' was freed already"


@pytest.mark.parametrize("is_served", [False, True], ids=["embedded", "grpc"])
def test_a_second_free_names_the_request(*, is_served: bool) -> None:
    with running_server() as served, connect(served if is_served else "embedded:") as client:
        client.create_pool(pool_config())
        session = client.open_session("m")
        request = session.request("r", range(5))
        session.free(request)  # never declared: nothing to free
        session.admit(request)
        session.free(request)
        with pytest.raises(NotFoundError, match=MESSAGE):
            session.free(request)
        with pytest.raises(NotFoundError, match=MESSAGE), session.step() as step:
            step.free(request)
        assert (session.sequence, session.pool().free_blocks) == (2, 99)
        session.admit(request)
        session.free(request)


@pytest.mark.parametrize("is_served", [False, True], ids=["embedded", "grpc"])
def test_a_freed_request_gets_no_slots_until_it_is_begun_again(*, is_served: bool) -> None:
    with running_server() as served, connect(served if is_served else "embedded:") as client:
        client.create_pool(pool_config())
        session = client.open_session("m")
        request = session.request("r", range(32))
        session.allocate_slots(request, 32)
        session.free(request)
        with pytest.raises(NotFoundError, match=MESSAGE):
            session.allocate_slots(request, 32)
        assert (session.sequence, session.pool().requests, session.pool().free_blocks) == (2, 0, 99)
        session.allocate_slots(request, 16, computed=session.get_computed_blocks(request))
        assert session.pool().requests == 1


def test_a_second_free_names_the_request_for_asyncio() -> None:
    async def main() -> None:
        async with aio.connect("embedded:") as client:
            await client.create_pool(pool_config())
            session = await client.open_session("m")
            request = session.request("r", range(5))
            await session.admit(request)
            await session.free(request)
            with pytest.raises(NotFoundError, match=MESSAGE):
                await session.free(request)

    asyncio.run(main())
