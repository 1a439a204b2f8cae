"""Clients of a cluster of two shards. Its seeds are `SeedServer`s, its shards are two real servers."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpool.client import (
    AbortedError,
    Client,
    NotFoundError,
    PoolState,
    UnavailableError,
    WatchKind,
    WrongStateError,
    aio,
    connect,
)
from kvpool.client.admin import AdminClient
from kvpool.core.errors import InvalidArgumentError
from support.answers import until_answered
from support.command import kvpool
from support.seed_server import SeedServer, seed_servers
from support.server import pool_config, running_server, server_process
from support.shard import shard_servers
from support.waiting import DEADLINE_SECONDS
from support.workers import worker_processes

PROMPT = list(range(9))


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, list[str]]]:
    """The addresses of the two shards."""
    with running_server(quarantine_seconds=0.0) as one, running_server(quarantine_seconds=0.0) as two:
        yield {"one": [one], "two": [two]}


@pytest.fixture
def shards(servers: dict[str, list[str]]) -> Iterator[dict[str, list[str]]]:
    """The shards, without pools at the end of the test."""
    yield {name: list(addresses) for name, addresses in servers.items()}
    for (address,) in servers.values():
        with AdminClient(address) as admin:
            for session in admin.sessions():
                admin.evict_session(session.pool_name, session.session_number)
            for info in admin.overview().pools:
                admin.remove_pool(info.config.name)


@pytest.fixture
def seeds(tmp_path: Path, shards: dict[str, list[str]]) -> Iterator[list[SeedServer]]:
    with seed_servers(tmp_path, shards, "a", "b", "c") as servers:
        yield servers


@pytest.fixture
def seed(seeds: list[SeedServer]) -> SeedServer:
    return seeds[0]


def client_in(zone: str, *seeds: SeedServer, deadline_seconds: float = DEADLINE_SECONDS) -> Client:
    address = ",".join(seed.address for seed in seeds)
    return connect(address, deadline_seconds=deadline_seconds, zone=zone)


def pools_at(address: str) -> list[str]:
    with AdminClient(address) as admin:
        return [info.config.name for info in admin.overview().pools]


def test_one_client_has_sessions_in_pools_of_both_shards(seed: SeedServer, shards: dict[str, list[str]]) -> None:
    seed.pools["q"] = "one"
    with client_in("two", seed) as client:
        for name in ("p", "q"):
            client.create_pool(pool_config(name))
        with client.open_session("p") as first, client.open_session("q") as second:
            for session in (first, second):
                session.admit(session.request("r", PROMPT))
                assert session.pool().config.name == session.config.name
        assert client.get_pool("p").state is PoolState.READY
    assert [pools_at(shards[name][0]) for name in ("one", "two")] == [["q"], ["p"]]
    assert seed.asked == [("Place", "p"), ("Place", "q")]


async def test_one_asyncio_client_has_sessions_in_pools_of_both_shards(
    seed: SeedServer, shards: dict[str, list[str]]
) -> None:
    seed.pools["q"] = "one"
    async with aio.connect(seed.address, zone="two") as client:
        for name in ("p", "q"):
            await client.create_pool(pool_config(name))
        async with await client.open_session("p") as first, await client.open_session("q") as second:
            for session in (first, second):
                await session.admit(session.request("r", PROMPT))
                assert (await session.pool()).config.name == session.config.name
    assert [pools_at(shards[name][0]) for name in ("one", "two")] == [["q"], ["p"]]
    assert seed.asked == [("Place", "p"), ("Place", "q")]


def test_the_zone_of_the_environment_is_the_default(seed: SeedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_ZONE", "two")
    with connect(seed.address) as client:
        client.create_pool(pool_config("p"))
    with connect(seed.address, zone="one") as client:
        client.create_pool(pool_config("q"))
    assert seed.pools == {"p": "two", "q": "one"}


def test_another_client_locates_a_pool_once(seed: SeedServer) -> None:
    with client_in("two", seed) as client:
        client.create_pool(pool_config("p"))
    seed.asked.clear()
    with client_in("", seed) as client:
        with pytest.raises(NotFoundError, match="no shard has a pool 'missing'"):
            client.get_pool("missing")
        for _ in range(2):
            client.open_session("p").close()
            client.get_pool("p")
    assert seed.asked == [("Locate", "missing"), ("Locate", "p")]


def test_a_pool_that_was_created_again_in_another_shard_is_found(
    seed: SeedServer, shards: dict[str, list[str]]
) -> None:
    with client_in("one", seed) as client:
        client.create_pool(pool_config("p"))
        with AdminClient(shards["one"][0]) as admin:
            admin.remove_pool("p")
        seed.pools["p"] = "two"
        with client_in("", seed) as other:
            other.create_pool(pool_config("p"))
        assert client.open_session("p").session_number
    assert pools_at(shards["two"][0]) == ["p"]


def test_all_seeds_are_asked_until_one_answers(seeds: list[SeedServer], tmp_path: Path) -> None:
    first, second, third = seeds
    first.stop()
    second.error = UnavailableError("DIRECTORY_UNKNOWN", "the server has not read the directory of shards yet")
    with client_in("two", *seeds) as client:
        client.create_pool(pool_config("p"))
        client.get_pool("p")
    assert (second.asked, third.asked) == ([("Place", "p")], [("Place", "p")])
    dead = f"unix:{tmp_path}/missing,{first.address},{second.address},{third.address}"
    with AdminClient(dead, deadline_seconds=DEADLINE_SECONDS) as admin:
        assert [info.config.name for info in admin.overview("p").pools] == ["p"]


def test_without_an_answer_the_error_states_what_each_seed_said(seeds: list[SeedServer]) -> None:
    for seed in seeds[1:]:
        seed.error = UnavailableError("DIRECTORY_UNKNOWN", "the server has not read the directory of shards yet")
    seeds[0].stop()
    started = time.monotonic()
    with client_in("", *seeds, deadline_seconds=5.0) as client, pytest.raises(UnavailableError) as caught:
        client.get_pool("p")
    assert time.monotonic() - started < DEADLINE_SECONDS
    for seed, text in zip(
        seeds, ("there is no such socket", "the server has not read", "the server has not read"), strict=True
    ):
        assert f"{seed.address}: {text}" in str(caught.value)
    assert all(len(seed.asked) < 20 for seed in seeds)


@pytest.mark.parametrize("addresses", [[], ["nowhere"], ["nowhere"] * 500])
def test_a_shard_without_a_valid_address_is_unavailable(
    seed: SeedServer, shards: dict[str, list[str]], addresses: list[str]
) -> None:
    shards["two"] = addresses
    seed.pools["p"] = "two"
    with client_in("", seed, deadline_seconds=1.0) as client, pytest.raises(UnavailableError) as caught:
        until_answered(lambda: client.get_pool("p"))
    assert str(caught.value) == "no valid address of a server of shard 'two' is known now"
    with AdminClient(seed.address, deadline_seconds=1.0) as admin, pytest.raises(UnavailableError) as caught:
        until_answered(lambda: admin.reset_prefix_cache("p"))
    assert caught.value.reason == "NO_ADDRESS"


def test_addresses_of_a_shard_that_are_gone_are_passed_over(
    seed: SeedServer, shards: dict[str, list[str]], tmp_path: Path
) -> None:
    shards["two"] = [f"unix:{tmp_path}/gone-{number}" for number in range(3)] + shards["two"]
    with client_in("two", seed) as client:
        client.create_pool(pool_config("p"))
        assert client.open_session("p").session_number


def test_a_bad_zone_is_refused_and_named(shards: dict[str, list[str]]) -> None:
    with connect(shards["one"][0], zone="no zone") as client, pytest.raises(InvalidArgumentError, match=r"^zone: "):
        client.create_pool(pool_config("p"))
    assert pools_at(shards["one"][0]) == []


def test_a_worker_with_a_bad_zone_ends(shards: dict[str, list[str]], tmp_path: Path) -> None:
    with worker_processes(tmp_path) as workers:
        worker = workers.start(shards["one"][0], 0, 1, "--zone", "no zone")
        assert worker.end() == 1
    assert "INVALID_VALUE: --zone: needs 1 to 64 letters" in "".join(worker.lines)


def test_a_pool_is_waited_for_that_no_shard_has_yet(seed: SeedServer) -> None:
    with client_in("two", seed) as client, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.wait_until_ready, "p", timeout_seconds=DEADLINE_SECONDS)
        assert seed.on_locate.wait(DEADLINE_SECONDS)
        assert not waiting.done()
        client.create_pool(pool_config("p"))
        assert waiting.result().state is PoolState.READY
        with pytest.raises(NotFoundError, match="no shard has a pool 'q'"):
            client.wait_until_ready("q", timeout_seconds=0.3)


async def test_an_asyncio_client_waits_for_a_pool_that_no_shard_has_yet(seed: SeedServer) -> None:
    async with aio.connect(seed.address, zone="two") as client:
        waiting = asyncio.create_task(client.wait_until_ready("p", timeout_seconds=DEADLINE_SECONDS))
        assert await asyncio.to_thread(seed.on_locate.wait, DEADLINE_SECONDS)
        await client.create_pool(pool_config("p"))
        assert (await waiting).state is PoolState.READY
        with pytest.raises(NotFoundError):
            await client.wait_until_ready("q", timeout_seconds=0.3)


@pytest.mark.parametrize("pool", ["", "p"])
def test_a_session_is_resumed_in_its_shard(seed: SeedServer, pool: str) -> None:
    with client_in("two", seed) as client:
        client.create_pool(pool_config("p"))
        session = client.open_session("p", lease_seconds=600)
        session.admit(session.request("r", PROMPT))
        seed.asked.clear()
        with client_in("", seed) as other:
            resumed = other.resume_session(session.session_id, sequence=session.sequence, pool=pool)
            assert [held.request_id for held in resumed.held_requests] == ["r"]
            with resumed.step() as step:
                step.admit(resumed.request("s", PROMPT))
        with pytest.raises(AbortedError):
            session.admit(session.request("t", PROMPT))
    assert seed.asked == ([("Locate", "p")] if pool else [("ListShards", "")])


def test_a_session_that_no_shard_has_is_not_found(seed: SeedServer, shards: dict[str, list[str]]) -> None:
    with client_in("", seed) as client:
        with pytest.raises(NotFoundError) as caught:
            client.resume_session("unknown")
        assert caught.value.reason == "SESSION_NOT_FOUND"
        shards.clear()
        with pytest.raises(UnavailableError, match="no shard of the cluster has a primary now"):
            client.resume_session("unknown")


def test_watches_of_both_shards(seed: SeedServer) -> None:
    seed.pools["q"] = "one"
    with client_in("two", seed) as client:
        for name in ("p", "q"):
            client.create_pool(pool_config(name, enable_events=True))
            watch = client.watch(name, snapshot=True)
            assert [next(watch).kind, next(watch).kind] == [WatchKind.START, WatchKind.SNAPSHOT_END]
            with client.open_session(name) as session:
                session.admit(session.request("r", PROMPT))
            assert next(watch).events


def test_a_watch_follows_a_pool_that_is_created_again_in_another_shard(
    seed: SeedServer, shards: dict[str, list[str]], tmp_path: Path
) -> None:
    shards["one"] = [f"unix:{tmp_path / 'one'}"]
    with client_in("one", seed) as client:
        with server_process(*shards["one"], grace_seconds=0.1):
            client.create_pool(pool_config("p", enable_events=True))
            watch = client.watch("p", snapshot=True)
            first = next(watch)
            assert next(watch).kind is WatchKind.SNAPSHOT_END
        with server_process(*shards["one"]):  # it has lost its pools
            seed.pools["p"] = "two"
            with client_in("", seed) as other:
                other.create_pool(pool_config("p", enable_events=True))
            again = next(batch for batch in watch if batch.kind is WatchKind.START)
    assert again.boot_id != first.boot_id


def test_a_session_follows_servers_that_replace_each_other(tmp_path: Path) -> None:
    """The client is given the address of no server that serves at the end."""
    with (
        running_server() as backend,
        shard_servers(tmp_path, backend, "first", "second", "third") as (first, second, third),
        seed_servers(tmp_path, {"s": [first.address]}, "seed") as (seed,),
        client_in("s", seed) as client,
    ):
        client.create_pool(pool_config("p"))
        session = client.open_session("p", lease_seconds=600)
        first.report(1, first.address, standbys=[second.address])
        assert second.watched.wait(DEADLINE_SECONDS)
        first.report(1, first.address, standbys=[third.address])
        second.stop()
        assert third.watched.wait(DEADLINE_SECONDS)
        third.lead()
        first.stop()
        assert session.admit(session.request("r", PROMPT))
        assert "Schedule" in third.calls


def test_a_closed_client_has_closed_its_shards(seed: SeedServer) -> None:
    client = client_in("two", seed)
    client.create_pool(pool_config("p"))
    session = client.open_session("p")
    client.close()
    for call in (lambda: session.admit(session.request("r", PROMPT)), lambda: client.get_pool("p")):
        with pytest.raises(WrongStateError) as caught:
            call()
        assert caught.value.reason == "CLOSED"


def test_an_operator_reaches_the_shard_of_a_pool(seed: SeedServer) -> None:
    with client_in("two", seed) as client, AdminClient(seed.address) as admin:
        client.create_pool(pool_config("p"))
        session = client.open_session("p")
        session.admit(session.request("r", PROMPT))
        assert [info.session_number for info in admin.sessions("p")] == [session.session_number]
        assert [info.request_id for info in admin.requests("p")] == ["r"]
        assert len(list(admin.blocks("p"))) == 99
        assert admin.set_weights_version("p", "v2") == (session.session_number,)
        assert admin.drain("p") == 1
        assert admin.undrain("p") == ()
        assert len(admin.reset_prefix_cache("p")) == 1
        assert admin.evict_session("p", session.session_number).session_number == session.session_number
        admin.remove_pool("p")
        with pytest.raises(NotFoundError):
            list(admin.sessions("missing"))
    assert [each for each in seed.asked if each[0] == "Locate"] == [("Locate", "p"), ("Locate", "missing")]


def test_a_command_waits_for_the_sessions_of_a_pool_in_its_shard(seed: SeedServer) -> None:
    with client_in("two", seed) as client:
        client.create_pool(pool_config("p"))
        with client.open_session("p"):
            flags = ("--pool", "p", "--wait", "--timeout-seconds", "0.6", "--json", "--address", seed.address)
            done = kvpool("drain", *flags)
            assert (done.returncode, json.loads(done.stdout)) == (1, {"drained": True, "sessions": 1})
