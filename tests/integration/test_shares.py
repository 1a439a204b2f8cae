"""The share of a server that the tokens of one name can use, and the rest for others."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.client import Client, ExhaustedError, connect
from kvpool.client.admin import AdminClient
from kvpool.server.limits.config import DEFAULT_LIMITS
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvpool.wire.errors import from_rpc_error
from kvpool.wire.ranks import registration_to_proto
from support.answers import until_answered
from support.auth import Entry, Silent, channel, secret_of, write_tokens
from support.ranks import registration
from support.server import ServerProcess, pool_config, server_process
from support.waiting import DEADLINE_SECONDS

TOKENS: list[Entry] = [
    *({"name": name, "role": "scheduler", "pools": ["*"]} for name in ("a", "b")),
    {"name": "ranks", "role": "worker", "pools": ["*"]},
    {"name": "ops", "role": "admin", "pools": ["*"]},
]


class House:
    """A server with tokens and a journal. A token may have three sessions and requests, two pools, five calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix:{folder / 's'}"
        write_tokens(folder / "tokens.toml", TOKENS)
        self.server = ServerProcess(
            self.address,
            auth={"tokens": str(self.folder / "tokens.toml")},
            limits={"max_token_sessions": 3, "max_token_pools": 2, "max_token_calls": 5, "max_token_requests": 3},
            journal={"folder": str(self.folder / "journal")},
        )

    def client(self, name: str, deadline_seconds: float = 30.0) -> Client:
        return connect(self.address, token=secret_of(name), deadline_seconds=deadline_seconds)

    def hasty(self, name: str) -> Client:
        """A client for calls that are refused, which it repeats until its deadline."""
        return self.client(name, deadline_seconds=2.0)

    def state(self) -> list[object]:
        """Everything that AdminService returns, except times."""
        with AdminClient(self.address, token=secret_of("ops")) as admin:
            return [*admin.overview().pools, *(info.session_number for info in admin.sessions())]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.server.stop_cleanly()


def test_one_token_cannot_take_all_sessions_also_after_a_restart(house: House) -> None:
    with house.client("a") as a, house.client("b") as b, house.hasty("b") as hasty:
        a.create_pool(pool_config("p"))
        a.create_pool(pool_config("q"))
        for name in ("p", "p", "q"):
            b.open_session(name, lease_seconds=600)
        house.server.restart()
        before = house.state()
        with pytest.raises(ExhaustedError, match="the token 'b' has 3 sessions") as caught:
            until_answered(lambda: hasty.open_session("q"))
        error = caught.value
        assert (error.reason, error.field, error.retry_seconds) == ("TOO_MANY_TOKEN_SESSIONS", "pool_name", 1.0)
        assert house.state() == before
        with a.open_session("p"), a.open_session("p"), a.open_session("q"):
            pass


def test_one_token_cannot_take_all_sessions_of_a_shared_pool_by_default(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.toml", TOKENS)
    with (
        server_process(f"unix:{tmp_path / 's'}", auth={"tokens": str(tmp_path / "tokens.toml")}) as server,
        channel(server.addresses[0], secret_of("b")) as opened,
        connect(server.addresses[0], token=secret_of("a")) as other,
    ):
        other.create_pool(pool_config("p"))
        stub = allocator_pb2_grpc.AllocatorServiceStub(opened)
        request = allocator_pb2.OpenSessionRequest(pool_name="p", lease_seconds=600)

        def take_all() -> None:
            for _ in range(DEFAULT_LIMITS.max_pool_sessions):
                stub.OpenSession(request)

        with pytest.raises(grpc.RpcError) as caught:
            take_all()
        assert from_rpc_error(caught.value).reason == "TOO_MANY_TOKEN_SESSIONS"
        with other.open_session("p") as session:
            assert session.pool().sessions == DEFAULT_LIMITS.max_pool_sessions // 2 + 1


def test_one_token_cannot_take_all_pools_also_after_a_restart(house: House) -> None:
    with house.client("a") as a, house.client("b") as b, house.hasty("b") as hasty:
        for name in ("b1", "b2"):
            b.create_pool(pool_config(name))
        for _ in range(2):
            before = house.state()
            with pytest.raises(ExhaustedError, match="the token 'b' has 2 pools") as caught:
                until_answered(lambda: hasty.create_pool(pool_config("b3")))
            error = caught.value
            assert (error.reason, error.field, error.retry_seconds) == ("TOO_MANY_TOKEN_POOLS", "config.name", 1.0)
            assert house.state() == before
            house.server.restart()
        b.create_pool(pool_config("b1"))  # it exists
        a.create_pool(pool_config("a1"))
        with AdminClient(house.address, token=secret_of("ops")) as admin:
            admin.remove_pool("b1")
        b.create_pool(pool_config("b3"))


def test_forming_pools_count_for_the_token_of_their_first_rank(house: House) -> None:
    with channel(house.address, secret_of("ranks")) as opened:
        stub = worker_pb2_grpc.WorkerServiceStub(opened)
        joined: list[tuple[Any, queue.SimpleQueue[worker_pb2.JoinRequest | None]]] = []

        def join(pool: str, rank: int = 0) -> worker_pb2.JoinResponse:
            said: queue.SimpleQueue[worker_pb2.JoinRequest | None] = queue.SimpleQueue()
            said.put(worker_pb2.JoinRequest(register=registration_to_proto(pool, registration(rank, world_size=3))))
            call: Any = stub.Join(iter(said.get, None), timeout=DEADLINE_SECONDS)
            joined.append((call, said))  # an unreferenced call would be cancelled
            answer: worker_pb2.JoinResponse = next(call)
            return answer

        join("r1")
        join("r2")
        before = house.state()
        with pytest.raises(grpc.RpcError) as caught:
            join("r3")
        error = from_rpc_error(caught.value)
        assert (error.reason, error.field) == ("TOO_MANY_TOKEN_POOLS", "register.pool_name")
        assert house.state() == before
        assert join("r2", rank=1).HasField("registered")
        with house.client("a") as a:
            a.create_pool(pool_config("a1"))
        for _, said in joined:
            said.put(None)


def test_one_token_cannot_take_all_calls_with_or_without_their_requests(house: House) -> None:
    service = "kvpool.v1.AllocatorService"
    wanted = allocator_pb2.WaitUntilReadyRequest(pool_name="none", timeout_seconds=30)
    with channel(house.address, secret_of("a")) as opened, house.client("b") as b:
        b.create_pool(pool_config("b1"))
        stub, request = allocator_pb2_grpc.AllocatorServiceStub(opened), allocator_pb2.GetPoolRequest(pool_name="b1")
        stub.GetPool(request)  # connected: later calls arrive in order
        held = [Silent(opened, f"{service}/{name}") for name in ["WaitUntilReady"] * 3 + ["GetPool", "Schedule"]]
        for call in held[:2]:
            call.send(wanted.SerializeToString())
        before = house.state()
        for _ in range(2):
            with pytest.raises(grpc.RpcError, match="5 calls of the token 'a' are in flight") as caught:
                stub.GetPool(request)
            error = from_rpc_error(caught.value)
            assert (error.reason, error.retry_seconds) == ("TOO_MANY_TOKEN_CALLS", 1.0)
        assert house.state() == before
        assert b.get_pool("b1")
        for call in held:
            call.close()
        stub.GetPool(request)
