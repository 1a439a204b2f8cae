"""Servers of a shard with real sockets and journals: the standbys have the state of the primary."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from kvpool.core.specs.pool_config import PoolConfig
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.standbys import NOTHING
from kvpool.server.codec import DamageError
from support.core import config
from support.journal import Traffic
from support.memory_directory import Fate, Store
from support.replicas import ReplicaServer, servers_of_a_shard
from support.waiting import DEADLINE_SECONDS, until

CONFIG = config(60, enable_events=True)


def traffic_of(server: ReplicaServer, pool: PoolConfig = CONFIG, seed: int = 1) -> Traffic:
    return Traffic(server.state, pool, seed)


async def hand_over(server: ReplicaServer, calls: list[str]) -> bool:
    """Hands over; `calls` are those of the server that the hand-over makes."""
    return await server.shard.hand_overs.run(lambda: calls.append("hold"), lambda: calls.append("resume"))


async def assert_in_sync(primary: ReplicaServer, *standbys: ReplicaServer) -> None:
    """Checks that the in-sync standbys have the primary's state once they have confirmed everything."""
    assert primary.num_in_sync() == 1 + len(standbys)
    await primary.shard.gate.wait(None)
    expected = await primary.encoded()
    for standby in standbys:
        assert await standby.encoded() == expected


@pytest.mark.parametrize(("num_servers", "num_changes_each", "seed"), [(2, 1, 1), (2, 7, 2), (3, 3, 3)])
async def test_standbys_have_the_state_of_the_primary_after_every_change(
    tmp_path: Path, num_servers: int, num_changes_each: int, seed: int
) -> None:
    async with servers_of_a_shard(tmp_path, num_servers, Store()) as (primary, *standbys):
        traffic = traffic_of(primary, seed=seed)
        for _ in range(60):
            for _ in range(num_changes_each):
                traffic.change()
            await assert_in_sync(primary, *standbys)
        assert all(standby.role is Role.STANDBY for standby in standbys)


async def test_a_standby_that_stops_reading_is_left_behind(tmp_path: Path) -> None:
    async with servers_of_a_shard(tmp_path, 2, Store()) as (primary, standby):
        traffic = traffic_of(primary)
        primary.shard.replica.standbys._timeout_seconds = 0.2
        link = standby.shard.client._stream
        assert link
        assert link._transport
        link._transport.pause_reading()
        traffic.change()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await primary.shard.gate.wait(None)  # the primary continues without it
        assert primary.num_in_sync() == 1
        link._transport.resume_reading()
        await until(lambda: primary.num_in_sync() == 2)
        await assert_in_sync(primary, standby)


async def test_standbys_take_over_in_turn_and_old_primaries_join_again(tmp_path: Path) -> None:
    store = Store()
    async with servers_of_a_shard(tmp_path, 2, store) as servers:
        traffic = traffic_of(servers[0])
        for term in (2, 3, 4):
            first, second = servers[-2:]
            for _ in range(40):
                traffic.change()
            first.state.renew_leases(0.0)  # as the next primary does
            await assert_in_sync(first, second)
            expected = await first.encoded()
            await first.die()
            await until(second.is_primary)
            assert await second.encoded() == expected
            assert second.shard.replica.known_term == term
            traffic.allocator = second.state
            returned = ReplicaServer(first.folder, store)
            servers.append(returned)
            await returned.start()
            await until(partial(second.has_in_sync, 2))
            await assert_in_sync(second, returned)
            assert returned.shard.me.member_id == first.shard.me.member_id
    terms = [record.term for record in store.history]
    assert terms == sorted(terms)
    primaries = {(record.term, record.primary) for record in store.history}
    assert len(primaries) == len(set(terms)), "one primary per term"


@pytest.mark.parametrize("fate", Fate)
async def test_a_takeover_with_an_unknown_outcome_is_repeated(tmp_path: Path, fate: Fate) -> None:
    async with servers_of_a_shard(tmp_path, 2, Store()) as (primary, standby):
        traffic = traffic_of(primary)
        traffic.change()
        await assert_in_sync(primary, standby)
        expected = await primary.encoded()
        standby.directory.fates.append(fate)
        await primary.die()
        await until(standby.is_primary)
        assert standby.shard.replica.known_term == 2
        assert await standby.encoded() == expected


async def test_answers_leave_while_the_directory_is_down(tmp_path: Path) -> None:
    async with servers_of_a_shard(tmp_path, 2, Store()) as (primary, standby):
        traffic = traffic_of(primary)
        for server in (primary, standby):
            server.directory.is_up = False
        for _ in range(30):
            traffic.change()
            await assert_in_sync(primary, standby)


async def test_without_the_directory_nothing_is_answered_after_a_standby_is_lost(tmp_path: Path) -> None:
    async with servers_of_a_shard(tmp_path, 2, Store()) as (primary, standby):
        traffic = traffic_of(primary)
        primary.directory.is_up = False
        await standby.die()
        traffic.change()
        await until(lambda: primary.shard.directory_client.error)
        waiting = asyncio.create_task(primary.shard.gate.wait(None))
        await asyncio.sleep(0)
        assert not waiting.done()
        primary.directory.is_up = True
        async with asyncio.timeout(DEADLINE_SECONDS):
            await waiting
        assert primary.num_in_sync() == 1


async def test_a_primary_hands_over(tmp_path: Path) -> None:
    async with servers_of_a_shard(tmp_path, 3, Store()) as (primary, *standbys):
        traffic = traffic_of(primary)
        for _ in range(20):
            traffic.change()
        await assert_in_sync(primary, *standbys)
        expected = await primary.encoded()
        calls: list[str] = []
        assert await hand_over(primary, calls)
        assert calls == ["hold"]
        assert primary.deposed
        assert primary.deposed.term == 2
        await until(lambda: any(standby.role is Role.PRIMARY for standby in standbys))
        (successor,) = [standby for standby in standbys if standby.role is Role.PRIMARY]
        (other,) = [standby for standby in standbys if standby is not successor]
        assert primary.deposed.addresses == successor.shard.me.addresses
        assert await successor.encoded() == expected
        await until(lambda: successor.num_in_sync() == 2)
        await assert_in_sync(successor, other)


async def test_a_primary_without_a_standby_does_not_hand_over(tmp_path: Path) -> None:
    async with servers_of_a_shard(tmp_path, 1, Store()) as (primary,):
        calls: list[str] = []
        assert not await hand_over(primary, calls)
        assert (primary.role, calls) == (Role.PRIMARY, [])


async def test_hand_overs_wait_for_each_other(tmp_path: Path) -> None:
    async with servers_of_a_shard(tmp_path, 2, Store()) as (primary, standby):
        primary.directory.is_up = False
        calls: list[str] = []
        first, second = (asyncio.create_task(hand_over(primary, calls)) for _ in range(2))
        await until(lambda: calls)
        assert calls == ["hold"]
        first.cancel()
        primary.directory.is_up = True
        assert await second
        assert calls == ["hold", "resume", "hold"]
        await until(standby.is_primary)


async def test_a_primary_continues_if_the_caller_of_a_hand_over_goes(tmp_path: Path) -> None:
    async with servers_of_a_shard(tmp_path, 2, Store()) as (primary, _):
        primary.directory.is_up = False
        calls: list[str] = []
        handing_over = asyncio.create_task(hand_over(primary, calls))
        await until(lambda: calls)
        handing_over.cancel()
        await asyncio.gather(handing_over, return_exceptions=True)
        assert handing_over.cancelled()
        assert calls == ["hold", "resume"]
        assert primary.role is Role.PRIMARY


@asynccontextmanager
async def another_version(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, primary: ReplicaServer
) -> AsyncIterator[ReplicaServer]:
    """Runs a server with another core, which the primary has refused."""
    monkeypatch.setattr("kvpool.server.cluster.messages.core_fingerprint", lambda: "another core")
    server = ReplicaServer(folder / "other", store)
    try:
        await server.start()
        await until(lambda: primary.shard.check.waiting)
        yield server
    finally:
        await server.die()


async def test_a_server_of_another_version_gets_the_state_when_the_primary_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    async with (
        servers_of_a_shard(tmp_path, 1, store) as (primary,),
        another_version(tmp_path, store, monkeypatch, primary) as other,
    ):
        traffic = traffic_of(primary)
        for _ in range(20):
            traffic.change()
        assert (primary.num_in_sync(), other.shard.client.position) == (1, NOTHING)
        expected = await primary.encoded()
        calls: list[str] = []
        assert await hand_over(primary, calls)
        assert calls == ["hold"]
        await until(other.is_primary)
        assert await other.encoded() == expected
        assert other.num_in_sync() == 1
        assert primary.deposed
        assert primary.deposed.addresses == other.shard.me.addresses


async def test_standbys_of_the_same_version_are_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    async with (
        servers_of_a_shard(tmp_path, 2, store) as (primary, standby),
        another_version(tmp_path, store, monkeypatch, primary),
    ):
        assert await hand_over(primary, [])
        await until(standby.is_primary)


async def test_a_server_of_another_version_that_cannot_load_the_state_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    async with (
        servers_of_a_shard(tmp_path, 1, store) as (primary,),
        another_version(tmp_path, store, monkeypatch, primary) as other,
    ):

        def refuse(*_: object) -> None:
            raise DamageError("written by another version")

        monkeypatch.setattr("kvpool.server.cluster.replicated_state.load_snapshot", refuse)
        monkeypatch.setattr(
            "kvpool.server.cluster.hand_overs._COPY_SECONDS", 3600.0
        )  # the end of its connection ends it
        calls: list[str] = []
        assert not await hand_over(primary, calls)
        assert calls == ["hold", "resume"]
        assert (primary.role, other.role) == (Role.PRIMARY, Role.STANDBY)
        traffic_of(primary).change()
        await primary.shard.gate.wait(None)
        await until(lambda: primary.num_in_sync() == 1)
