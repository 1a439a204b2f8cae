"""Weights versions over real connections: engines that share memory load new weights one after the other."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.client import (
    AbortedError,
    Client,
    InvalidArgumentError,
    NotFoundError,
    Session,
    WrongStateError,
    aio,
    connect,
)
from kvpool.client.admin import AdminClient
from kvpool.core.errors import KvpoolError
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc
from kvpool.wire.errors import from_rpc_error
from support.server import ServerProcess, pool_config, running_server
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


def test_refusals_change_nothing(client: Client, pool: str) -> None:
    with client.open_session(pool, weights_version="1") as session, client.open_session(pool) as closed:
        hit(session)
        closed.close()
        before = client.get_pool(pool)
        with pytest.raises(InvalidArgumentError, match="longer than 256 bytes") as caught:
            session.set_weights_version("v" * 257)
        assert caught.value.field == "weights_version"
        with pytest.raises(InvalidArgumentError) as caught:
            client.open_session(pool, weights_version="v" * 257)
        assert caught.value.field == "weights_version"
        with pytest.raises(AbortedError):
            closed.set_weights_version("2")
        assert (client.get_pool(pool), session.weights_version) == (before, "1")
        assert hit(session) == 40


def test_the_call_of_a_session_needs_its_id(address: str) -> None:
    with connect(address) as client, grpc.insecure_channel(address) as channel:
        client.create_pool(pool_config("lease"))
        stub: allocator_pb2_grpc.AllocatorServiceStub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        request = allocator_pb2.OpenSessionRequest(pool_name="lease", lease_seconds=60, weights_version="1")
        opened = stub.OpenSession(request).session
        assert opened.weights_version == "1"

        def refused(session_id: str) -> KvpoolError:
            with pytest.raises(grpc.RpcError) as caught:
                stub.SetWeightsVersion(
                    allocator_pb2.SetWeightsVersionRequest(session_id=session_id, weights_version="2")
                )
            assert client.get_pool("lease").weights_versions == ["1"]
            return from_rpc_error(caught.value)

        assert type(refused("absent")) is NotFoundError
        stub.SetWeightsVersion(
            allocator_pb2.SetWeightsVersionRequest(session_id=opened.session_id, weights_version="2")
        )
        assert client.get_pool("lease").weights_versions == ["2"]


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
            before = (admin.overview().pools, [hit(first), hit(second)])
            calls: list[tuple[type[KvpoolError], str, Callable[[], object]]] = [
                (NotFoundError, "pool_name", lambda: admin.set_weights_version("nowhere", "3")),
                (NotFoundError, "session_number", lambda: admin.set_weights_version("operated", "3", 10**6)),
                (
                    NotFoundError,
                    "session_number",
                    lambda: admin.set_weights_version("operated", "3", beside.session_number),
                ),
                (InvalidArgumentError, "weights_version", lambda: admin.set_weights_version("operated", "v" * 257)),
            ]
            pools = admin.overview().pools
            for kind, field, call in calls:
                with pytest.raises(kind) as caught:
                    call()
                assert caught.value.field == field
                assert admin.overview().pools == pools
            assert before[1] == [0, 40]
            assert [hit(first), hit(second)] == [40, 40]


@pytest.mark.slow
def test_a_restart_with_a_journal_keeps_the_version(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    settings: dict[str, Any] = {"journal": {"folder": str(tmp_path / "journal")}}
    with ServerProcess(address, **settings) as server:
        with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
            client.create_pool(pool_config())
            session = client.open_session("m", lease_seconds=600, weights_version="1")
            assert hit(session) == 0
            session.set_weights_version("2")
            for round_number in range(2):  # replays the changes, then reads a snapshot
                if round_number:
                    server.stop_cleanly()
                server.restart()
                assert client.get_pool("m").weights_versions == ["2"]
                assert hit(session) == 40 * round_number
                with client.open_session("m", weights_version="1") as other:
                    assert hit(other) == 40
            session.close()
        assert "journal dropped" not in server.stop_cleanly()
