"""Weights versions over real connections: engines that share memory load new weights one after the other."""

from collections.abc import Callable, Iterator

import pytest

from kvpool.client import (
    Client,
    Session,
    WrongStateError,
    aio,
    connect,
)
from kvpool.client.admin import AdminClient
from kvpool.core.errors import KvpoolError
from support.server import pool_config, running_server
from support.waiting import DEADLINE_SECONDS

PROMPT = list(range(41))  # ten full blocks and one token
LONG = [*PROMPT, *range(100, 108)]


@pytest.fixture(scope="module", name="address")
def fixture_address() -> Iterator[str]:
    with running_server() as address:
        yield address


@pytest.fixture(name="client", params=["service", "embedded"])
def fixture_client(request: pytest.FixtureRequest, address: str) -> Iterator[Client]:
    with connect(address if request.param == "service" else "embedded:", deadline_seconds=DEADLINE_SECONDS) as client:
        yield client


@pytest.fixture(name="pool")
def fixture_pool(client: Client, request: pytest.FixtureRequest) -> str:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    client.create_pool(pool_config(name))
    return name


_numbers = iter(range(10**9))


def hit(session: Session, token_ids: list[int] = PROMPT) -> int:
    """Serves a request: returns the tokens that it hits, computes the rest, and frees it."""
    request = session.request(f"r{next(_numbers)}", token_ids)
    admission = session.admit(request)
    assert admission
    session.mark_executed()
    session.free(request)
    return admission.num_hit_tokens


def test_two_engines_load_new_weights_one_after_the_other(client: Client, pool: str) -> None:
    with (
        client.open_session(pool, weights_version="1") as first,
        client.open_session(pool, weights_version="1") as second,
    ):
        assert [hit(first), hit(second)] == [0, 40]
        running = first.request("running", PROMPT)
        assert first.admit(running)
        first.mark_executed()
        table = [list(ids) for ids in running.block_ids]
        before = client.get_pool(pool)

        first.set_weights_version("2")
        assert (first.weights_version, list(client.get_pool(pool).weights_versions)) == ("2", ["1", "2"])
        after = client.get_pool(pool)
        assert (after.free_blocks, after.preemptions) == (before.free_blocks, before.preemptions)
        running.append(LONG[41:])
        assert first.allocate_slots(running, 8)
        first.mark_executed()
        assert [ids[: len(table[0])] for ids in running.block_ids] == table
        assert hit(second, LONG) == 40, "blocks with contents of two versions are not found"
        assert hit(first, LONG) == 0
        assert hit(second) == 40
        first.free(running)

        second.set_weights_version("2")
        assert hit(second, LONG) == 48
        assert client.get_pool(pool).weights_versions == ["2"]


def test_a_step_without_an_answer_is_settled_first(client: Client, pool: str) -> None:
    with client.open_session(pool) as session:
        with session.begin_step() as step:
            admitted = step.admit(session.request("r", PROMPT))
        with pytest.raises(WrongStateError, match="settle"):
            session.set_weights_version("1")
        assert client.get_pool(pool).weights_versions == [""]
        session.settle()
        assert admitted.ok
        session.set_weights_version("1")
        assert client.get_pool(pool).weights_versions == ["1"]


async def test_the_asyncio_client_sets_the_version(address: str) -> None:
    async with aio.connect(address) as client:
        await client.create_pool(pool_config("aio"))
        async with await client.open_session("aio", weights_version="1") as session:
            await session.set_weights_version("2")
            assert (session.weights_version, list((await client.get_pool("aio")).weights_versions)) == ("2", ["2"])


def test_an_operator_sets_the_version(address: str) -> None:
    with connect(address) as client, AdminClient(address) as admin:
        client.create_pool(pool_config("operated"))
        client.create_pool(pool_config("beside"))
        assert admin.set_weights_version("operated", "1") == ()
        with (
            client.open_session("operated") as first,
            client.open_session("operated") as second,
            client.open_session("beside") as beside,
        ):
            numbers = (first.session_number, second.session_number)
            assert hit(first) == 0
            assert admin.set_weights_version("operated", "1") == numbers
            assert [hit(first), hit(second)] == [0, 40]
            assert admin.set_weights_version("operated", "2", first.session_number) == (first.session_number,)
            assert [info.weights_version for info in admin.sessions("operated")] == ["2", "1"]
            assert [info.weights_version for info in admin.sessions("beside")] == [""]
            refusals: list[tuple[str, Callable[[], object]]] = [
                ("pool_name", lambda: admin.set_weights_version("nowhere", "3")),
                ("session_number", lambda: admin.set_weights_version("operated", "3", beside.session_number)),
                ("weights_version", lambda: admin.set_weights_version("operated", "v" * 257)),
            ]
            pools = admin.overview().pools
            for field, call in refusals:
                with pytest.raises(KvpoolError) as caught:
                    call()
                assert caught.value.field == field
            assert admin.overview().pools == pools
            assert [hit(first), hit(second)] == [0, 40]
