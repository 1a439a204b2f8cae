"""The rules of `kvpool.client.transports.cluster`."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest

from kvpool.client import DeadlineError, KvpoolError, NotFoundError, ServerError, UnavailableError, WrongStateError
from kvpool.client.blocking import run
from kvpool.client.transports.blocking_grpc import BlockingGrpcTransport
from kvpool.client.transports.cluster import ClusterService
from kvpool.v1 import directory_pb2
from kvpool.wire.seeds import ShardAddress
from support.socket_server import SocketServer

ONE, TWO = ShardAddress("one", ("a:1", "b:1")), ShardAddress("two", ("c:1",))
NO_POOL = NotFoundError("POOL_NOT_FOUND", "no pool 'm'")
OTHER = WrongStateError("OTHER_SHARD", "pool 'm' belongs to shard 'two'")


class Transport:
    """The transport to a shard, which keeps the addresses.

    Attributes:
        locations: Answers to the next questions for the pool.
    """

    deadline_seconds = 30.0

    def __init__(self, name: str, addresses: Sequence[str]) -> None:
        self.name = name
        self.addresses = tuple(addresses)
        self.locations: list[ShardAddress | KvpoolError] = []
        self.connection = self
        self.is_closed = False

    def at_shard(self, name: str, addresses: Sequence[str]) -> "Transport":
        return Transport(name, addresses)

    def learn_members(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)

    async def ask(self, method: str, request: object, _seconds: float, _read: object, _default: object) -> ShardAddress:
        assert (method, request) == ("Locate", directory_pb2.LocateRequest(pool_name="m"))
        location = self.locations.pop(0)
        if isinstance(location, KvpoolError):
            raise location
        return location

    async def close(self) -> None:
        self.is_closed = True


class Cluster:
    """Plays answers.

    Attributes:
        service: The service that is tested.
        errors: Errors of the next calls.
        called: Names of the shards that were called.
    """

    def __init__(self) -> None:
        self.seeds = Transport("", ())
        seeds: Any = self.seeds
        self.service: ClusterService[Any] = ClusterService(seeds)
        self.errors: list[KvpoolError | None] = []
        self.called: list[str] = []

    def knows(self, *locations: ShardAddress | KvpoolError) -> None:
        """Sets the answers to the next questions for the pool."""
        self.seeds.locations = [*locations]

    async def answer(self, shard: Transport, left_seconds: float) -> Transport:
        assert 0 < left_seconds <= 30.0
        self.called.append(shard.name)
        if error := self.errors.pop(0) if self.errors else None:
            raise error
        return shard

    def call(self) -> Transport:
        return run(self.service.call("m", self.answer))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_rule_1_a_pool_is_located_once(cluster: Cluster) -> None:
    cluster.knows(ONE)
    assert cluster.call() is cluster.call()
    assert (cluster.called, cluster.seeds.locations) == (["one", "one"], [])


def test_rule_1_pools_of_a_shard_share_a_connection_that_learns_its_servers(cluster: Cluster) -> None:
    cluster.knows(ONE, ShardAddress("one", ("d:1",)))
    cluster.errors = [None, UnavailableError("NO_PRIMARY", "")]
    first = cluster.call()
    with pytest.raises(UnavailableError):
        cluster.call()
    assert cluster.call() is first
    assert first.addresses == ("d:1",)


@pytest.mark.parametrize("moved", [NO_POOL, OTHER])
def test_rule_2_a_pool_that_has_moved_is_located_again(cluster: Cluster, moved: KvpoolError) -> None:
    cluster.knows(ONE, TWO)
    cluster.errors = [None, moved]
    cluster.call()
    assert cluster.call().name == "two"
    assert cluster.call().name == "two"
    assert cluster.called == ["one", "one", "two", "two"]


def test_rule_2_a_pool_that_was_removed_is_not_found(cluster: Cluster) -> None:
    cluster.knows(ONE, NO_POOL)
    cluster.errors = [None, NO_POOL]
    cluster.call()
    with pytest.raises(NotFoundError, match="no pool 'm'"):
        cluster.call()
    assert cluster.called == ["one", "one"]


def test_a_pool_that_is_not_there_is_asked_for_once(cluster: Cluster) -> None:
    cluster.knows(ONE)
    cluster.errors = [NO_POOL]
    with pytest.raises(NotFoundError):
        cluster.call()
    cluster.knows(NO_POOL)
    with pytest.raises(NotFoundError):
        cluster.call()
    assert cluster.called == ["one"]


def test_servers_that_name_each_other_are_asked_twice(cluster: Cluster) -> None:
    cluster.knows(ONE, TWO, ONE)
    cluster.errors = [OTHER] * 9
    with pytest.raises(UnavailableError, match="do not agree now which shard has pool 'm'") as caught:
        cluster.call()
    assert (caught.value.reason, caught.value.retry_seconds) == ("NOT_LOCATED", 1.0)
    assert cluster.called == ["one", "two"]


@pytest.mark.parametrize(
    "error", [UnavailableError("NO_PRIMARY", ""), UnavailableError("UNAVAILABLE", ""), DeadlineError("DEADLINE", "")]
)
def test_rule_2_a_shard_that_cannot_be_reached_is_located_by_the_next_call(
    cluster: Cluster, error: KvpoolError
) -> None:
    cluster.knows(ONE, TWO)
    cluster.errors = [error]
    with pytest.raises(type(error)):
        cluster.call()
    assert cluster.call().name == "two"


@pytest.mark.parametrize("error", [UnavailableError("DRAINING", ""), WrongStateError("POOL_FORMING", "")])
def test_other_errors_keep_the_location(cluster: Cluster, error: KvpoolError) -> None:
    cluster.knows(ONE)
    cluster.errors = [error]
    with pytest.raises(type(error)):
        cluster.call()
    assert cluster.call().name == "one"


def test_rule_3_a_server_without_a_cluster_has_all_pools(cluster: Cluster) -> None:
    cluster.knows(ShardAddress())
    assert cluster.call() is cluster.seeds
    assert cluster.call() is cluster.seeds


def test_a_call_without_a_pool_goes_to_the_addresses_of_the_client(cluster: Cluster) -> None:
    cluster.errors = [OTHER]
    with pytest.raises(WrongStateError):
        run(cluster.service.call("", cluster.answer))
    assert run(cluster.service.call("", cluster.answer)) is cluster.seeds
    assert cluster.called == ["", ""]


def test_another_error_of_the_directory_is_raised(cluster: Cluster) -> None:
    cluster.knows(ServerError("INTERNAL", "a bug"))
    with pytest.raises(ServerError, match="a bug"):
        cluster.call()


def test_a_shard_to_which_the_token_may_not_be_sent_is_unavailable(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, addresses: Sequence[str]) -> Transport:
        raise ValueError(f"token: {addresses[0]} of {name} does not use TLS")

    monkeypatch.setattr(cluster.seeds, "at_shard", refuse)
    cluster.knows(ONE)
    with pytest.raises(UnavailableError, match="a:1 of one does not use TLS") as caught:
        cluster.call()
    assert caught.value.reason == "NO_ACCESS"


def test_a_closed_client_connects_to_no_shard(cluster: Cluster) -> None:
    cluster.knows(ONE, TWO)
    one = cluster.call()
    cluster.errors = [UnavailableError("NO_PRIMARY", "")]
    with pytest.raises(UnavailableError):
        cluster.call()
    run(cluster.service.close())
    assert one.is_closed
    assert cluster.seeds.is_closed
    with pytest.raises(WrongStateError) as caught:
        cluster.call()
    assert caught.value.reason == "CLOSED"


@pytest.mark.parametrize("is_old", [True, False])
def test_rule_3_a_server_that_is_too_old_to_be_asked_has_all_pools(tmp_path: Path, *, is_old: bool) -> None:
    def refuse(_: object, context: grpc.ServicerContext) -> NoReturn:
        context.abort(grpc.StatusCode.INTERNAL, "a bug")

    service = directory_pb2.DESCRIPTOR.services_by_name["DirectoryService"].full_name
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(refuse)
    handlers = {} if is_old else {"Locate": method}
    handler = grpc.method_handlers_generic_handler(service, handlers)
    with SocketServer(tmp_path / "socket", lambda server: server.add_generic_rpc_handlers((handler,))) as server:
        seeds = BlockingGrpcTransport(server.address, 10.0)
        with contextlib.nullcontext() if is_old else pytest.raises(ServerError, match="a bug"):
            run(ClusterService(seeds).call("m", lambda shard, _: _is(shard, seeds)))
        run(seeds.close())


async def _is(one: object, other: object) -> None:
    assert one is other
