"""The hand-overs that balance the hosts of a cluster."""

from collections import Counter
from random import Random

from kvpool.cli.shard_moves import moves_to_balance
from kvpool.client.admin import Shard


def shard(name: str, primary: str, *standbys: str, num_pools: int = 0) -> Shard:
    return Shard(name, 1, (f"{primary}:1",), tuple((f"{standby}:1",) for standby in standbys), num_pools)


def moved(*shards: Shard) -> dict[str, str]:
    return {move.shard.name: move.to for move in moves_to_balance(shards)}


def test_half_of_the_primaries_of_a_pair_of_hosts_move() -> None:
    shards = [shard(name, "a", "b") for name in "wxyz"]
    moves = moved(*shards)
    assert len(moves) == 2
    assert set(moves.values()) == {"b:1"}


def test_nothing_moves_where_it_does_not_help() -> None:
    assert moved() == {}
    assert moved(shard("x", "a", "b")) == {}
    assert moved(shard("x", "a", "b"), shard("y", "b", "a")) == {}
    assert moved(shard("x", "a", "a"), shard("y", "a", "a")) == {}, "another server of the same host"
    assert moved(shard("x", "a"), shard("y", "a")) == {}, "no standbys"
    assert moved(Shard("x", 0, (), (("b:1",),)), shard("y", "a", "b")) == {}, "no primary"


def test_pools_count() -> None:
    full, others = shard("full", "a", "b", num_pools=9), [shard(name, "a", "b", num_pools=2) for name in "xyz"]
    assert moved(full, *others) in ({"full": "b:1"}, dict.fromkeys("xyz", "b:1"))


def test_a_third_host_takes_its_part() -> None:
    shards = [shard(f"s{number}", "a", "b", "c") for number in range(6)]
    assert Counter(moved(*shards).values()) == {"b:1": 2, "c:1": 2}


def test_random_clusters_end_with_hosts_of_about_equal_loads() -> None:
    random = Random(7)  # noqa: S311 - repeatable
    hosts = [f"h{number}" for number in range(5)]
    for _ in range(50):
        shards = []
        for number in range(random.randint(1, 40)):
            primary, *standbys = random.sample(hosts, 3)
            shards.append(shard(f"s{number}", primary if random.random() < 0.5 else "h0", *standbys))
        targets = moved(*shards)
        loads = Counter(targets.get(each.name, each.primary[0]) for each in shards)
        for each in shards:  # no single move helps any more
            now = targets.get(each.name, each.primary[0])
            for (standby,) in (each.primary, *each.standbys):
                assert loads[now] - loads[standby] <= 1
