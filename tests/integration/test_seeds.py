"""Clients and ranks that know several addresses of a shard. Its servers are `ShardServer`s before one real server."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.client import Session, WatchKind, aio, connect
from kvpool.client.admin import AdminClient
from kvpool.v1.pool_pb2 import PoolState
from support.command import kvpool
from support.server import pool_config, running_server
from support.shard import ShardServer, shard_servers
from support.waiting import DEADLINE_SECONDS, wait_until
from support.workers import Workers

PROMPT = list(range(9))


@pytest.fixture
def address() -> Iterator[str]:
    with running_server() as address:
        yield address


@pytest.fixture
def way(request: pytest.FixtureRequest) -> str:
    """How steps are sent."""
    return getattr(request, "param", "link")


@pytest.fixture
def shard(tmp_path: Path, address: str, way: str) -> Iterator[list[ShardServer]]:
    """A primary and a standby."""
    with shard_servers(tmp_path, address, "primary", "standby", has_links=way == "link") as servers:
        yield servers


def seeds(*servers: ShardServer) -> str:
    return ",".join(server.address for server in servers)


def take_over(old: ShardServer, new: ShardServer) -> None:
    """Makes another server the primary of term 2. The old one is out of order."""
    new.lead()
    new.report(2, new.address)
    old.report(2, new.address)


def change(old: ShardServer, new: ShardServer) -> None:
    """Makes another server the primary of term 2. The old one knows it."""
    new.lead()
    old.refuse(2, new.address)


def stop(old: ShardServer, new: ShardServer) -> None:
    """Makes another server the primary, after the old one has died."""
    old.stop()
    new.lead()


def hang(old: ShardServer, new: ShardServer) -> None:
    """Makes another server the primary, while the old one answers nothing, but keeps its connections open."""
    assert new.watched.wait(DEADLINE_SECONDS)
    old.hang()
    timer = threading.Timer(0.2, take_over, (old, new))  # usually a step waits by then
    timer.start()


FAILOVERS = pytest.mark.parametrize("failover", [change, stop, hang])
WAYS = pytest.mark.parametrize("way", ["link", pytest.param("Schedule", marks=pytest.mark.slow)], indirect=True)


def decode(session: Session, request: object, token: int) -> None:
    with session.step() as step:
        step.decode([request], [token])  # type: ignore[list-item]


def test_a_session_finds_the_primary_through_a_standby(shard: list[ShardServer]) -> None:
    primary, standby = shard
    with connect(seeds(standby, primary), deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(pool_config())
        with client.open_session("m") as session:
            request = session.request("r", PROMPT)
            session.admit(request)
            decode(session, request, 7)
    assert standby.calls == ["CreatePool"]
    assert {"CreatePool", "OpenSession", "link", "CloseSession"} <= set(primary.calls)


def test_one_address_of_a_standby_is_enough(shard: list[ShardServer]) -> None:
    with connect(shard[1].address, deadline_seconds=DEADLINE_SECONDS) as client:
        assert client.create_pool(pool_config()).config.name == "m"


@FAILOVERS
@WAYS
def test_steps_of_a_session_continue_at_the_next_primary(
    shard: list[ShardServer], failover: Callable[[ShardServer, ShardServer], None], way: str
) -> None:
    with connect(seeds(*shard), deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(pool_config())
        with client.open_session("m", lease_seconds=600) as session:
            request = session.request("r", PROMPT)
            session.admit(request)
            failover(*shard)
            other = session.request("other", PROMPT)
            session.admit(other)
            assert session.sequence == 2
            assert session.pool().free_blocks == 99 - len({*request.block_ids[0], *other.block_ids[0]})
            session.free(request)
            session.free(other)
            assert session.pool().free_blocks == 99
    assert way in shard[1].calls


@FAILOVERS
@WAYS
def test_a_step_that_was_begun_is_settled_at_the_next_primary(
    shard: list[ShardServer], failover: Callable[[ShardServer, ShardServer], None]
) -> None:
    with connect(seeds(*shard), deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(pool_config())
        with client.open_session("m", lease_seconds=600) as session:
            session.admit(session.request("r", PROMPT))
            if failover is hang:
                assert shard[1].watched.wait(DEADLINE_SECONDS)
                shard[0].hang()  # the step is applied, and its answer is lost
            with session.begin_step() as step:
                step.admit(session.request("other", PROMPT))
            failover(*shard)
            session.settle()
            assert session.sequence == 2


@FAILOVERS
@WAYS
async def test_an_asyncio_session_continues_at_the_next_primary(
    shard: list[ShardServer], failover: Callable[[ShardServer, ShardServer], None], way: str
) -> None:
    async with aio.connect(seeds(*reversed(shard)), deadline_seconds=DEADLINE_SECONDS) as client:
        await client.create_pool(pool_config())
        async with await client.open_session("m", lease_seconds=600) as session:
            request = session.request("r", PROMPT)
            await session.admit(request)
            await asyncio.to_thread(failover, *shard)
            await session.free(request)
            assert session.sequence == 2
            assert (await client.get_pool("m")).free_blocks == 99
    assert way in shard[1].calls


def test_a_session_without_steps_keeps_its_lease_at_the_next_primary(shard: list[ShardServer]) -> None:
    with connect(seeds(*shard), deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(pool_config())
        with client.open_session("m", lease_seconds=6) as session:
            change(*shard)
            wait_until(lambda: "KeepAlive" in shard[1].calls, "a renewal")
            assert session.lease_left_seconds > 0


@pytest.mark.parametrize("failover", [change, stop])
def test_a_watch_continues_at_the_next_primary(
    shard: list[ShardServer], failover: Callable[[ShardServer, ShardServer], None]
) -> None:
    with connect(seeds(*reversed(shard)), deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(pool_config(enable_events=True))
        watch = client.watch("m", snapshot=True, heartbeat_seconds=0.5)
        assert [next(watch).kind, next(watch).kind] == [WatchKind.START, WatchKind.SNAPSHOT_END]
        failover(*shard)
        with client.open_session("m") as session:
            session.admit(session.request("r", PROMPT))
            batch = next(batch for batch in watch if batch.kind is WatchKind.BATCH and batch.events)
        assert batch.events
    assert "Watch" in shard[1].calls


def test_an_operator_finds_the_primary(shard: list[ShardServer], tmp_path: Path) -> None:
    primary, standby = shard
    for address in (seeds(standby, primary), standby.address, f"unix:{tmp_path}/missing,{primary.address}"):
        with AdminClient(address, deadline_seconds=DEADLINE_SECONDS) as admin:
            assert not admin.overview().pools
            assert admin.server == primary.address


def test_a_command_of_an_operator_skips_a_dead_seed(shard: list[ShardServer], tmp_path: Path) -> None:
    done = kvpool("pools", "--json", "--address", f"unix:{tmp_path}/missing,{seeds(*reversed(shard))}")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["pools"] == []
    done = kvpool("pools", KVPOOL_ADDRESS=f"{shard[0].address},nowhere")
    assert done.returncode == 2
    assert "address 'nowhere': needs host:port or unix:/path" in done.stderr


@pytest.mark.slow
def test_a_rank_joins_and_joins_again_through_a_standby(
    address: str, shard: list[ShardServer], workers: Workers
) -> None:
    primary, standby = shard
    workers.form(seeds(standby, primary), 1)
    assert (standby.calls, primary.calls) == (["Join"], ["Join"])
    change(primary, standby)
    with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        assert client.wait_until_ready("m", timeout_seconds=DEADLINE_SECONDS).state == PoolState.POOL_STATE_READY
    workers.started[0].wait_for(r"server back")
    assert standby.calls == ["Join", "Join"]
