"""The rules of `kvpool.client.shards`."""

from collections.abc import Callable, Sequence

import pytest

from kvpool.client import DeadlineError, KvpoolError, NotFoundError, ServerError, UnavailableError, WrongStateError
from kvpool.client.blocking import run
from kvpool.client.shards import Shards
from kvpool.wire.seeds import ShardAddress

ONE, TWO = ShardAddress("one", ("a:1", "b:1")), ShardAddress("two", ("c:1",))
NO_POOL = NotFoundError("POOL_NOT_FOUND", "no pool 'm'")
OTHER = WrongStateError("OTHER_SHARD", "pool 'm' belongs to shard 'two'")


class Connection:
    """A connection that keeps the addresses."""

    def __init__(self, name: str, addresses: Sequence[str]) -> None:
        self.name = name
        self.addresses = tuple(addresses)

    def learn_members(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)


class Cluster:
    """Plays answers.

    Attributes:
        shards: The shards that are tested.
        locations: Answers to the next questions for the pool.
        errors: Errors of the next calls.
        called: Names of the shards that were called.
    """

    def __init__(self) -> None:
        self.seeds = Connection("", ())
        self.shards: Shards[Connection] = Shards(self.seeds, Connection)
        self.locations: list[ShardAddress | KvpoolError] = []
        self.errors: list[KvpoolError | None] = []
        self.called: list[str] = []

    async def locate(self) -> ShardAddress:
        location = self.locations.pop(0)
        if isinstance(location, KvpoolError):
            raise location
        return location

    async def answer(self, shard: Connection) -> Connection:
        self.called.append(shard.name)
        if error := self.errors.pop(0) if self.errors else None:
            raise error
        return shard

    def call(self) -> Connection:
        return run(self.shards.call("m", self.locate, self.answer))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_rule_1_a_pool_is_located_once(cluster: Cluster) -> None:
    cluster.locations = [ONE]
    assert cluster.call() is cluster.call()
    assert (cluster.called, cluster.locations) == (["one", "one"], [])


def test_rule_1_pools_of_a_shard_share_a_connection_that_learns_its_servers(cluster: Cluster) -> None:
    cluster.locations = [ONE]
    first = cluster.call()
    second = cluster.shards.connection(ShardAddress("one", ("d:1",)))
    assert first is second
    assert first.addresses == ("d:1",)


@pytest.mark.parametrize("moved", [NO_POOL, OTHER])
def test_rule_2_a_pool_that_has_moved_is_located_again(cluster: Cluster, moved: KvpoolError) -> None:
    cluster.locations, cluster.errors = [ONE, TWO], [None, moved]
    cluster.call()
    assert cluster.call().name == "two"
    assert cluster.call().name == "two"
    assert cluster.called == ["one", "one", "two", "two"]


def test_rule_2_a_pool_that_was_removed_is_not_found(cluster: Cluster) -> None:
    cluster.locations, cluster.errors = [ONE, NO_POOL], [None, NO_POOL]
    cluster.call()
    with pytest.raises(NotFoundError, match="no pool 'm'"):
        cluster.call()
    assert cluster.called == ["one", "one"]


def test_a_pool_that_is_not_there_is_asked_for_once(cluster: Cluster) -> None:
    cluster.locations, cluster.errors = [ONE], [NO_POOL]
    with pytest.raises(NotFoundError):
        cluster.call()
    cluster.locations = [NO_POOL]
    with pytest.raises(NotFoundError):
        cluster.call()
    assert cluster.called == ["one"]


def test_servers_that_name_each_other_are_asked_twice(cluster: Cluster) -> None:
    cluster.locations, cluster.errors = [ONE, TWO, ONE], [OTHER] * 9
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
    cluster.locations, cluster.errors = [ONE, TWO], [error]
    with pytest.raises(type(error)):
        cluster.call()
    assert cluster.call().name == "two"


@pytest.mark.parametrize("error", [UnavailableError("DRAINING", ""), WrongStateError("POOL_FORMING", "")])
def test_other_errors_keep_the_location(cluster: Cluster, error: KvpoolError) -> None:
    cluster.locations, cluster.errors = [ONE], [error]
    with pytest.raises(type(error)):
        cluster.call()
    assert cluster.call().name == "one"


@pytest.mark.parametrize("answer", [ShardAddress(), ServerError("UNIMPLEMENTED", "")])
def test_rule_3_a_server_without_a_cluster_has_all_pools(cluster: Cluster, answer: ShardAddress | KvpoolError) -> None:
    cluster.locations = [answer]
    assert cluster.call() is cluster.seeds
    assert cluster.call() is cluster.seeds


def test_another_error_of_the_directory_is_raised(cluster: Cluster) -> None:
    cluster.locations = [ServerError("INTERNAL", "a bug")]
    with pytest.raises(ServerError, match="a bug"):
        cluster.call()


def test_a_shard_to_which_the_token_may_not_be_sent_is_unavailable(cluster: Cluster) -> None:
    def refuse(name: str, addresses: Sequence[str]) -> Connection:
        raise ValueError(f"token: {addresses[0]} of {name} does not use TLS")

    shards: Shards[Connection] = Shards(cluster.seeds, refuse)
    with pytest.raises(UnavailableError, match="a:1 of one does not use TLS") as caught:
        shards.connection(ONE)
    assert caught.value.reason == "NO_ACCESS"


def test_a_closed_client_connects_to_no_shard(cluster: Cluster) -> None:
    cluster.locations = [ONE]
    one = cluster.call()
    assert cluster.shards.end() == (one, cluster.seeds)
    connect: Callable[[ShardAddress], Connection] = cluster.shards.connection
    with pytest.raises(WrongStateError) as caught:
        connect(TWO)
    assert caught.value.reason == "CLOSED"
