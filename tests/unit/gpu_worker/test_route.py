"""The rules of `kvpool.gpu_worker.route`."""

import pytest

from kvpool.core.errors import ExhaustedError, KvpoolError, NotPrimaryError, UnavailableError, WrongStateError
from kvpool.gpu_worker.route import Route
from kvpool.wire.seeds import OTHER_SHARD, ShardAddress

A, B, C, D = "a:1", "b:1", "c:1", "d:1"
GONE = UnavailableError("UNAVAILABLE", "nothing listens there")


def test_rule_1_a_rank_asks_before_it_joins() -> None:
    route = Route((A, B))
    assert (route.asks, route.target) == (True, A)
    route.placed(ShardAddress("two", (C, D)))
    assert (route.asks, route.target) == (False, C)


def test_rule_1_without_a_cluster_it_joins_at_its_addresses() -> None:
    route = Route((A, B))
    route.placed(ShardAddress())
    assert (route.asks, route.target) == (False, A)


@pytest.mark.parametrize("error", [GONE, UnavailableError("DIRECTORY_UNKNOWN", "")])
def test_rule_1_each_of_its_addresses_is_asked(error: KvpoolError) -> None:
    route = Route((A, B))
    assert route.failed(error) == 0.0
    assert (route.asks, route.target) == (True, B)
    assert route.failed(error) == 0.05
    assert (route.asks, route.target) == (True, A)


def test_rule_2_a_primary_that_is_named_is_joined_at_once() -> None:
    route = Route((A,))
    route.placed(ShardAddress("two", (C,)))
    assert route.failed(NotPrimaryError((D,), 3)) == 0.0
    assert (route.asks, route.target) == (False, D)


@pytest.mark.parametrize("error", [WrongStateError(OTHER_SHARD, ""), ExhaustedError("SLOW", "", retry_seconds=1.0)])
def test_rule_2_a_rank_that_is_refused_asks_again(error: KvpoolError) -> None:
    route = Route((A,))
    route.placed(ShardAddress("two", (C, D)))
    assert route.failed(error) is None
    assert (route.asks, route.target) == (True, A)
    route.placed(ShardAddress("three", (B,)))
    assert (route.asks, route.target) == (False, B)


def test_rule_2_a_rank_that_finds_no_primary_learns_the_servers_that_replaced_them() -> None:
    route = Route((A,))
    route.placed(ShardAddress("two", (B,)))
    assert route.failed(GONE) is None
    route.placed(ShardAddress("two", (C, D)))
    assert (route.asks, route.target) == (False, C)
    assert route.failed(GONE) == 0.0
    assert route.target == D


def test_rule_3_a_rank_whose_addresses_are_gone_joins_the_shard_that_it_knows() -> None:
    route = Route((A,))
    assert route.failed(GONE) is None
    assert route.asks
    route.placed(ShardAddress("two", (C,)))
    for _ in range(3):
        assert route.failed(GONE) is None
        assert (route.asks, route.target) == (True, A)
        assert route.failed(GONE) is None
        assert (route.asks, route.target) == (False, C)


def test_pauses_grow_until_a_server_works() -> None:
    route = Route((A,))
    unknown = NotPrimaryError((), 0)
    pauses = []
    for _ in range(3):
        route.placed(ShardAddress("two", (C,)))
        pauses.append(route.failed(unknown))
    assert pauses == [0.05, 0.1, 0.2]
    route.placed(ShardAddress("two", (C,)))
    route.joined()
    assert route.failed(unknown) == 0.05
