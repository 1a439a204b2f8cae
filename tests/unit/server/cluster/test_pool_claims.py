"""Placement of new pools, and the claims of a shard's primary."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.core.errors import ExhaustedError, UnavailableError, WrongStateError
from kvpool.core.ids import PoolName
from kvpool.server.auth.caller import CALLER, Caller
from kvpool.server.auth.tokens import Grant, Role
from kvpool.server.cluster import reachability
from kvpool.server.cluster.directory import DamagedRecordError, ShardName, ShardRecord, VersionedRecord
from kvpool.server.cluster.directory_cache import DirectoryCache
from kvpool.server.cluster.pool_claims import MAX_PROBES, Placement, PoolClaims, choose
from kvpool.server.cluster.token_claims import CLAIM_SECONDS, TokenClaims
from kvpool.server.limits.config import Limits
from support.listeners import listening, record_at, refusing
from support.memory_directory import Store
from support.replicas import SHARD, ReplicaServer, servers_of_a_shard, until

OTHER = ShardName("other")
P, Q = PoolName("p"), PoolName("q")
PICK = random.Random(7).randrange  # noqa: S311 - repeatable


def in_zone(zone: str) -> ShardRecord:
    return record_at("h:1", zone=zone)


def test_of_two_shards_the_one_with_fewer_pools_is_chosen() -> None:
    shards = dict.fromkeys(map(ShardName, "abc"), in_zone(""))
    counts = {ShardName("a"): 3, ShardName("b"): 2}
    for picks, expected in (((0, 0), "b"), ((0, 1), "c"), ((1, 0), "b"), ((2, 1), "c")):
        remaining = list(picks)
        assert choose(shards, counts, 9, "", lambda _, left=remaining: left.pop(0)) == expected  # type: ignore[misc]


def test_the_fullest_shard_stays_near_the_average() -> None:
    shards = dict.fromkeys((ShardName(f"s{number}") for number in range(100)), in_zone(""))
    counts: Counter[ShardName] = Counter()
    for _ in range(10_000):
        counts[choose(shards, counts, 10_000, "", PICK)] += 1
    assert max(counts.values()) <= 105  # one random choice: about 125
    assert min(counts.values()) >= 90


def test_shards_of_the_zone_are_preferred_while_they_have_space() -> None:
    shards = {ShardName("a"): in_zone("z1"), ShardName("b"): in_zone("z2"), ShardName("c"): in_zone("z2")}
    assert {choose(shards, {}, 9, "z2", PICK) for _ in range(50)} == {"b", "c"}
    assert {choose(shards, {ShardName("b"): 9}, 9, "z2", PICK) for _ in range(50)} == {"c"}
    assert {choose(shards, {ShardName("b"): 9, ShardName("c"): 9}, 9, "z2", PICK) for _ in range(50)} == {"a"}
    assert {choose(shards, {}, 9, "elsewhere", PICK) for _ in range(50)} == {"a", "b", "c"}


def test_a_cluster_without_shards_or_space() -> None:
    with pytest.raises(UnavailableError) as unavailable:
        choose({}, {}, 9, "", PICK)
    assert unavailable.value.reason == "NO_SHARD"
    with pytest.raises(ExhaustedError) as exhausted:
        choose({SHARD: in_zone("")}, {SHARD: 9}, 9, "", PICK)
    assert exhausted.value.reason == "TOO_MANY_POOLS"


class Claimed:
    """A primary of a shard with pools that tests add and remove, beside another shard."""

    def __init__(self, server: ReplicaServer, store: Store) -> None:
        self.store = store
        self.pools: list[PoolName] = []
        self.directory = server.directory
        self.view = DirectoryCache()
        self.now_seconds = 100.0
        token_claims = TokenClaims(Limits(max_token_pools=2), lambda: self.pools, lambda: self.now_seconds)
        placement = Placement(SHARD, 4, PICK)
        self.claims = PoolClaims(server.shard, self.view, lambda: self.pools, placement, token_claims)

    async def seen(self) -> None:
        """Waits until the view is what the store has."""
        await until(lambda: self.view.pools == self.store.pools and len(self.view.shards) == len(self.store.entries))


@pytest.fixture
def other_address() -> Iterator[str]:
    with listening() as address:
        yield address


@pytest.fixture
def lost_address() -> Iterator[str]:
    with refusing() as address:
        yield address


@pytest.fixture
async def claimed(tmp_path: Path, other_address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Claimed]:
    """The other shard is in the zone z2, and its server can be reached."""
    monkeypatch.setattr(reachability, "PROBE_SECONDS", 60.0)  # the machine may be slow
    store = Store()
    store.put(OTHER, record_at(other_address, zone="z2"))
    async with servers_of_a_shard(tmp_path, 1, store) as (server,):
        await until(server.is_primary)
        primary = Claimed(server, store)
        following = asyncio.create_task(primary.view.follow(primary.directory))
        await primary.seen()
        yield primary
        following.cancel()


async def test_a_pool_stays_where_it_was_placed(claimed: Claimed) -> None:
    assert await claimed.claims.place(P, "z2") == OTHER
    await claimed.seen()
    assert await claimed.claims.place(P, "") == OTHER
    assert claimed.store.pools == {P: OTHER}


async def test_a_lost_shard_gets_no_pool_and_keeps_those_that_it_has(claimed: Claimed, lost_address: str) -> None:
    assert await claimed.claims.place(P, "z2") == OTHER
    claimed.store.put(OTHER, record_at(lost_address, zone="z2", term=2))
    await claimed.seen()
    assert await claimed.claims.place(Q, "z2") == SHARD
    assert await claimed.claims.place(P, "z2") == OTHER
    assert claimed.store.pools == {P: OTHER, Q: SHARD}


async def test_no_pool_is_placed_if_no_shard_with_space_can_be_reached(claimed: Claimed, lost_address: str) -> None:
    claimed.store.pools |= {PoolName(f"own-{number}"): SHARD for number in range(4)}
    claimed.store.put(OTHER, record_at(lost_address, term=2))
    await claimed.seen()
    before = dict(claimed.store.pools)
    with pytest.raises(UnavailableError, match="that was tried: other") as caught:
        await claimed.claims.place(P, "")
    assert caught.value.reason == "NO_REACHABLE_SHARD"
    assert claimed.store.pools == before


@pytest.mark.parametrize("has_own", [True, False])
async def test_a_bounded_number_of_shards_is_probed(lost_address: str, *, has_own: bool) -> None:
    """Then the own shard gets the pool, though it has more."""
    shards = dict.fromkeys((ShardName(f"s{number}") for number in range(50)), record_at(lost_address))
    if has_own:
        shards[SHARD] = in_zone("")
    num_picks = 0

    def pick(below: int) -> int:
        nonlocal num_picks
        num_picks += 1
        return PICK(below)

    placement = Placement(SHARD, 9, pick)
    if has_own:
        assert await placement.choose(shards, {SHARD: 8}, "") == SHARD
    else:
        with pytest.raises(UnavailableError) as caught:
            await placement.choose(shards, {}, "")
        assert caught.value.reason == "NO_REACHABLE_SHARD"
    assert num_picks == 2 * MAX_PROBES + has_own


async def test_a_claim_of_a_shard_that_was_removed_is_released_when_it_is_met(claimed: Claimed) -> None:
    claimed.store.pools |= dict.fromkeys((P, Q, PoolName("r")), ShardName("removed"))
    claimed.store.notify()
    await claimed.seen()
    assert await claimed.claims.place(P, "z2") == OTHER
    await claimed.claims.claim(Q)
    claimed.pools.append(PoolName("r"))
    await claimed.claims.compare()
    assert claimed.claims.conflicts == frozenset()
    assert claimed.store.pools == {P: OTHER, Q: SHARD, PoolName("r"): SHARD}


async def test_a_claim_of_a_shard_that_this_server_has_not_seen_yet_is_kept(
    claimed: Claimed, other_address: str
) -> None:
    new = ShardName("new")
    claimed.store.entries[new] = VersionedRecord(1, record_at(other_address))
    claimed.store.pools[P] = new
    with pytest.raises(WrongStateError, match="'p' belongs to shard 'new'; this server has shard 'main'"):
        await claimed.claims.claim(P)
    assert claimed.store.pools == {P: new}


async def test_a_pool_of_another_shard_is_refused(claimed: Claimed, other_address: str) -> None:
    claimed.store.pools[P] = OTHER
    message = f"'p' belongs to shard 'other', at {other_address}; this server has shard 'main'"
    with pytest.raises(WrongStateError, match=message) as caught:
        await claimed.claims.claim(P)
    assert (caught.value.reason, caught.value.field) == ("OTHER_SHARD", "pool_name")
    assert claimed.store.pools == {P: OTHER}


async def test_a_pool_without_a_shard_is_claimed(claimed: Claimed) -> None:
    await claimed.claims.claim(P)
    await claimed.claims.claim(P)
    assert claimed.store.pools == {P: SHARD}


async def test_without_the_directory_only_pools_that_exist_are_had(claimed: Claimed) -> None:
    claimed.pools.append(P)
    claimed.directory.is_up = False
    await claimed.claims.claim(P)
    for call in (claimed.claims.claim(Q), claimed.claims.place(Q, "")):
        with pytest.raises(UnavailableError) as caught:
            await call
        assert caught.value.reason == "DIRECTORY_DOWN"
    assert claimed.store.pools == {}


async def test_pools_that_are_not_claimed_are_claimed(claimed: Claimed, caplog: pytest.LogCaptureFixture) -> None:
    """Those of a journal that is older than the cluster, or after the directory has lost them."""
    claimed.store.pools[Q] = OTHER
    claimed.pools += [P, Q]
    await claimed.claims.compare()
    assert claimed.store.pools == {P: SHARD, Q: OTHER}
    assert claimed.claims.conflicts == {Q}
    assert "two shards have a pool of the same name" in caplog.messages
    claimed.pools.remove(Q)
    await claimed.claims.compare()
    assert claimed.claims.conflicts == frozenset()


async def test_a_claim_without_a_pool_is_released_at_the_second_comparison(claimed: Claimed) -> None:
    claimed.store.pools |= {P: SHARD, Q: OTHER}
    claimed.store.notify()
    await claimed.seen()
    await claimed.claims.compare()
    assert P in claimed.store.pools
    await claimed.claims.compare()
    assert claimed.store.pools == {Q: OTHER}


async def test_a_claim_is_kept_while_its_pool_is_being_created(claimed: Claimed) -> None:
    await claimed.claims.claim(P)
    await claimed.seen()
    await claimed.claims.compare()
    await claimed.claims.claim(P)  # once more: the creation begins now
    await claimed.claims.compare()
    assert claimed.store.pools == {P: SHARD}
    claimed.pools.append(P)
    await claimed.claims.compare()
    await claimed.claims.compare()
    assert claimed.store.pools == {P: SHARD}


def call_with(token: str) -> None:
    """The following calls of this test have a token of this name."""
    CALLER.set(Caller(Grant(token, Role.SCHEDULER, ("*",), ()), lambda _: None))


async def assert_refused(claimed: Claimed, call: Coroutine[Any, Any, object], field: str) -> None:
    before = dict(claimed.store.pools)
    with pytest.raises(ExhaustedError, match="'a' has claimed 2 names of pools that are not created") as caught:
        await call
    assert (caught.value.reason, caught.value.field) == ("TOO_MANY_TOKEN_POOLS", field)
    assert caught.value.retry_seconds
    assert claimed.store.pools == before


async def test_a_token_takes_no_more_than_its_share_with_names_of_pools_that_are_not_created(claimed: Claimed) -> None:
    call_with("a")
    for name in (P, Q, P):
        await claimed.claims.place(name, "z2")
    await assert_refused(claimed, claimed.claims.place(PoolName("r"), "z2"), "pool_name")
    await assert_refused(claimed, claimed.claims.claim(PoolName("r"), "config.name"), "config.name")
    await claimed.seen()
    assert await claimed.claims.place(P, "") == OTHER  # it is claimed already
    call_with("b")
    assert await claimed.claims.place(PoolName("r"), "z2") == OTHER


async def test_a_claim_counts_until_its_pool_exists_or_the_claim_has_ended(claimed: Claimed) -> None:
    call_with("a")
    names = [PoolName(f"p{number}") for number in range(6)]
    for name in names[:4]:
        await claimed.claims.claim(name)
        claimed.pools.append(name)
    del claimed.pools[:2]  # removed again: their claims end later
    await assert_refused(claimed, claimed.claims.claim(names[4]), "pool_name")
    await claimed.seen()
    for _ in range(2):
        await claimed.claims.compare()
    assert claimed.store.pools == dict.fromkeys(names[2:4], SHARD)
    claimed.now_seconds += CLAIM_SECONDS - 1
    await assert_refused(claimed, claimed.claims.claim(names[4]), "pool_name")
    claimed.now_seconds += 1
    for name in names[4:]:
        await claimed.claims.claim(name)
    await assert_refused(claimed, claimed.claims.place(PoolName("p6"), ""), "pool_name")


async def test_calls_at_the_same_time_exceed_no_share(claimed: Claimed) -> None:
    call_with("a")
    claims = (claimed.claims.place(PoolName(f"p{number}"), "z2") for number in range(5))
    results = await asyncio.gather(*claims, return_exceptions=True)
    assert Counter(map(type, results)) == {str: 2, ExhaustedError: 3}
    assert len(claimed.store.pools) == 2


async def test_a_claim_whose_outcome_is_unknown_counts(claimed: Claimed) -> None:
    call_with("a")
    claimed.directory.is_up = False
    for name in (P, Q):
        with pytest.raises(UnavailableError):
            await claimed.claims.claim(name)
    claimed.directory.is_up = True
    await assert_refused(claimed, claimed.claims.claim(PoolName("r")), "pool_name")


async def test_without_tokens_claims_are_not_counted(claimed: Claimed) -> None:
    for number in range(5):
        await claimed.claims.claim(PoolName(f"p{number}"))
    assert len(claimed.store.pools) == 5


async def test_a_primary_that_another_one_replaced_releases_nothing(claimed: Claimed) -> None:
    await claimed.claims.claim(P)
    await claimed.seen()
    await claimed.claims.compare()
    entry = claimed.store.get(SHARD)
    claimed.store.entries[SHARD] = replace(entry, revision=entry.revision + 1)  # not reported yet
    await claimed.claims.compare()
    assert claimed.store.pools == {P: SHARD}


async def test_nothing_is_written_while_no_pool_comes_or_goes(claimed: Claimed) -> None:
    await claimed.claims.claim(P)
    claimed.pools.append(P)
    await claimed.seen()
    claimed.directory.is_up = False  # each call would fail
    for _ in range(3):
        await claimed.claims.compare()


async def test_a_claim_that_names_no_shard_stops_neither_the_server_nor_other_pools(
    claimed: Claimed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = claimed.directory.claim_pool

    async def claim_pool(pool: PoolName, shard: ShardName) -> ShardName:
        if pool == P:
            raise DamagedRecordError("/kvpool/c/pools/p in etcd: ... is no name of a shard")
        return await real(pool, shard)

    monkeypatch.setattr(claimed.directory, "claim_pool", claim_pool)
    with pytest.raises(WrongStateError) as caught:
        await claimed.claims.claim(P)
    assert (caught.value.reason, caught.value.field) == ("DAMAGED_RECORD", "pool_name")
    assert claimed.store.pools == {}
    claimed.pools += [P, Q]
    await claimed.claims.compare()
    assert claimed.claims.conflicts == {P}
    assert claimed.store.pools == {Q: SHARD}
    assert caplog.messages == ["damaged record"]
