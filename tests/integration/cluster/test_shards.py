"""Two shards of one cluster, real servers and a real etcd: where pools are, and how primaries move."""

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.cli.health import status_of
from kvpool.client import (
    Client,
    FullAttentionSpec,
    KVCacheGroup,
    PoolConfig,
    PoolInfo,
    PoolState,
    Request,
    Session,
    WatchKind,
    aio,
    connect,
)
from kvpool.client.admin import AdminClient
from kvpool.core.errors import ExhaustedError, UnavailableError, WrongStateError
from kvpool.core.ids import PoolName
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, directory_pb2, directory_pb2_grpc
from kvpool.wire import pools
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import from_rpc_error
from support import processes
from support.auth import channel, secret_of, write_tokens
from support.etcd import EtcdCluster, needs_etcd
from support.listeners import refusing
from support.pair import Pair, PairServer
from support.waiting import DEADLINE_SECONDS
from support.workers import Network, worker_processes

pytestmark = needs_etcd

CONFIG = PoolConfig(PoolName("m"), 500, 4096, (KVCacheGroup(FullAttentionSpec(16), ("layer",)),), enable_events=True)


@pytest.fixture
def shards(etcd: EtcdCluster, tmp_path: Path) -> Iterator[tuple[PairServer, Pair]]:
    """The shard `one` of a single server, and the shard `two` of a pair."""
    url = f"etcd://{etcd.nodes[0].endpoint}/{tmp_path.name}"
    single = Pair(tmp_path / "one", url, ["--zone", "z1"], shard_name="one")
    patient = ["--zone", "z2", "--takeover-seconds", "60", "--standby-timeout-seconds", "60"]
    pair = Pair(tmp_path / "two", url, patient, shard_name="two")
    with contextlib.ExitStack() as stack:
        stack.callback(single.close)
        stack.callback(pair.close)
        one = single.servers[0]
        one.start()
        pair.start()
        wait_for_shards(one, *pair.servers)
        yield one, pair


def wait_for_shards(*servers: PairServer) -> None:
    """Waits until each server knows both shards."""
    for server in servers:
        until(partial(knows_both, server))


def knows_both(server: PairServer) -> bool:
    """Whether a server knows both shards."""
    return {shard.name for shard in ask(server, "ListShards").shards} == {"one", "two"}


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition. A server that has not read the directory yet answers UNAVAILABLE."""
    due = time.monotonic() + DEADLINE_SECONDS
    while True:
        with contextlib.suppress(UnavailableError):
            if condition():
                return
        assert time.monotonic() < due
        time.sleep(0.02)


def ask(server: PairServer, method: str, token: str | None = None, **fields: Any) -> Any:
    """Calls DirectoryService of a server. Raises its errors."""
    request = getattr(directory_pb2, f"{method}Request")(**fields)
    with channel(server.address, token) as opened:
        stub = directory_pb2_grpc.DirectoryServiceStub(opened)
        try:
            return getattr(stub, method)(request, timeout=DEADLINE_SECONDS, wait_for_ready=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error, server.address, "") from None


def create(server: PairServer, pool: str) -> None:
    """Creates a pool at a server, without Place. Raises its error."""
    config = pools.config_to_proto(replace(CONFIG, name=PoolName(pool)), with_none_hash=True)
    with channel(server.address) as opened:
        stub = allocator_pb2_grpc.AllocatorServiceStub(opened)
        try:
            stub.CreatePool(allocator_pb2.CreatePoolRequest(config=config), timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error, server.address, "") from None


def kvpool(*arguments: str) -> Any:
    """Runs a command with --json."""
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(*arguments: str) -> str:
    """The error of a command that is refused."""
    done = run(*arguments)
    assert done.returncode == 1
    return done.stderr


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command."""
    return processes.run(
        [processes.KVPOOL, *arguments], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )


@contextlib.contextmanager
def running_request(pair: Pair) -> Iterator[tuple[Client, Session, Request]]:
    """Admits a request in a new pool of a shard in zone z2."""
    with connect(pair.seeds, deadline_seconds=DEADLINE_SECONDS, zone="z2") as client:
        client.create_pool(CONFIG)
        session = client.open_session("m", lease_seconds=300)
        request = session.request("r", token_ids=list(range(160)))
        assert session.admit(request)
        yield client, session, request


def test_a_token_takes_no_more_than_its_share_of_the_places_for_pools(etcd: EtcdCluster, tmp_path: Path) -> None:
    tokens = [{"name": name, "role": "scheduler", "pools": ["*"]} for name in "ab"]
    write_tokens(tmp_path / "tokens.toml", tokens)
    options = ["--tokens", str(tmp_path / "tokens.toml"), "--max-token-pools", "2", "--max-pools", "4"]
    with contextlib.closing(Pair(tmp_path, f"etcd://{etcd.nodes[0].endpoint}/{tmp_path.name}", options)) as pair:
        server = pair.servers[0]
        server.start()
        until(lambda: bool(ask(server, "ListShards", secret_of("a")).shards))
        place = partial(ask, server, "Place", secret_of("a"))
        assert {place(pool_name=name).is_own for name in ("p0", "p1")} == {True}
        with pytest.raises(ExhaustedError, match="the token 'a' has claimed 2 names of pools") as caught:
            place(pool_name="p2")
        assert (caught.value.reason, caught.value.field) == ("TOO_MANY_TOKEN_POOLS", "pool_name")
        with connect(server.address, token=secret_of("b"), deadline_seconds=DEADLINE_SECONDS) as other:
            other.create_pool(CONFIG)
        with connect(server.address, token=secret_of("a"), deadline_seconds=DEADLINE_SECONDS) as client:
            client.create_pool(replace(CONFIG, name=PoolName("p1")))
        assert place(pool_name="p2").is_own


def test_a_pool_belongs_to_one_shard(shards: tuple[PairServer, Pair]) -> None:
    one, two = shards
    primary, standby = two.primary(), two.standby()
    for number, server in enumerate((one, primary, standby)):
        placed = ask(server, "Place", pool_name=f"p{number}", zone="z2")
        assert placed.shard == "two"
        assert list(placed.addresses) == [primary.address, standby.address]
    with pytest.raises(WrongStateError, match=f"pool 'p0' belongs to shard 'two', at {primary.address}") as caught:
        create(one, "p0")
    assert caught.value.reason == "OTHER_SHARD"
    create(one, "m")  # without Place: it stays where the caller is
    with pytest.raises(WrongStateError, match="pool 'm' belongs to shard 'one'"):
        create(primary, "m")
    create(primary, "p0")
    for server in (one, primary, standby):
        assert ask(server, "Locate", pool_name="m").shard == "one"
        located = ask(server, "Locate", pool_name="p0")
        assert (located.shard, list(located.primary_addresses)) == ("two", [primary.address])
    listed = kvpool("shard", "list", "--address", standby.address)["shards"]
    assert [(shard["name"], shard["num_pools"]) for shard in listed] == [("one", 1), ("two", 3)]
    assert [shard["primary_serves"] for shard in listed] == [True, True]
    assert status_at(standby) == "NOT_SERVING", "it serves pools after a takeover"
    assert status_at(primary) == status_at(standby, "DirectoryService") == "SERVING"


def test_a_server_of_another_shard_at_a_former_address_ends_no_session(
    shards: tuple[PairServer, Pair], tmp_path: Path, etcd: EtcdCluster
) -> None:
    """While a shard fails over, its clients call each address that they know."""
    _, two = shards
    primary, standby = two.primary(), two.standby()
    with running_request(two) as (_, session, request):
        standby.pause()
        primary.kill()
        cluster = f"etcd://{etcd.nodes[0].endpoint}/{tmp_path.name}"
        options = ["--cluster", cluster, "--shard", "three"]
        other = PairServer(primary.host, tmp_path / "three", "three", options, is_cuttable=False)
        try:
            other.start()
            until(lambda: (shard := other.shard()) is not None and shard.primary_addresses == [other.address])
            with connect(other.address, deadline_seconds=DEADLINE_SECONDS) as late, ThreadPoolExecutor() as threads:
                found = threads.submit(late.get_pool, "m")  # the directory still names this address
                standby.resume()
                assert found.result(DEADLINE_SECONDS).epoch == session.epoch
            request.append([1])
            assert session.allocate_slots(request, 1)
        finally:
            other.kill()


def test_a_primary_moves_with_its_pools(shards: tuple[PairServer, Pair]) -> None:
    one, two = shards
    primary, standby = two.primary(), two.standby()
    with running_request(two) as (client, session, request):
        moved = kvpool("shard", "move", "two", standby.address, "--address", one.address)
        assert moved["primary"] == [standby.address]
        assert kvpool("shard", "move", "two", standby.address, "--address", one.address) == moved, "it is there"
        request.append([1])
        assert session.allocate_slots(request, 1)
        assert session.epoch == client.get_pool("m").epoch
    until(lambda: list(ask(one, "Locate", pool_name="m").primary_addresses) == [standby.address])
    two.wait_in_sync()
    refused = refusal("shard", "move", "two", one.address, "--address", one.address, "--wait-seconds", "0")
    assert f"NO_STANDBY: HOST:PORT: no server of shard two at {one.address} is in sync" in refused
    assert kvpool("shard", "balance", "--dry-run", "--address", primary.address) == {"moves": [], "dry_run": True}


def test_a_client_of_one_server_uses_pools_of_both_shards(shards: tuple[PairServer, Pair]) -> None:
    """The takeover of one shard does not disturb the other."""
    one, two = shards
    near, far = (replace(CONFIG, name=PoolName(name)) for name in ("near", "far"))
    with (
        connect(one.address, deadline_seconds=DEADLINE_SECONDS, zone="z1") as client,
        connect(f"{two.seeds},{one.address}", deadline_seconds=DEADLINE_SECONDS, zone="z2") as other,
    ):
        client.create_pool(near)
        other.create_pool(far)
        sessions = [client.open_session(name, lease_seconds=300) for name in ("near", "far")]
        watch = client.watch("far", snapshot=True, heartbeat_seconds=5.0)
        assert [next(watch).kind, next(watch).kind] == [WatchKind.START, WatchKind.SNAPSHOT_END]
        requests = [session.request("r", token_ids=list(range(160))) for session in sessions]
        for session, request in zip(sessions, requests, strict=True):
            assert session.admit(request)
        assert next(batch for batch in watch if batch.kind is WatchKind.BATCH).events
        with AdminClient(two.primary().address) as admin:
            admin.hand_over()
        for session, request in zip(sessions, requests, strict=True):
            request.append([1])
            assert session.allocate_slots(request, 1)
            assert session.sequence == 2
        other_session = other.open_session("near")
        assert other_session.admit(other_session.request("s", token_ids=list(range(16))))
        listed = {info.config.name for address in (one.address, two.primary().address) for info in pools_at(address)}
        assert listed == {"near", "far"}
        assert [info.config.name for info in pools_at(one.address)] == ["near"]
        assert len(kvpool("sessions", "--pool", "far", "--address", one.address)["sessions"]) == 1


async def test_an_asyncio_client_of_one_server_uses_pools_of_both_shards(shards: tuple[PairServer, Pair]) -> None:
    one, two = shards
    async with (
        aio.connect(one.address, deadline_seconds=DEADLINE_SECONDS, zone="z1") as client,
        aio.connect(one.address, deadline_seconds=DEADLINE_SECONDS, zone="z2") as other,
    ):
        await client.create_pool(replace(CONFIG, name=PoolName("near")))
        await other.create_pool(replace(CONFIG, name=PoolName("far")))
        sessions = [await client.open_session(name, lease_seconds=300) for name in ("near", "far")]
        for session in sessions:
            assert await session.admit(session.request("r", token_ids=list(range(160))))
        await asyncio.to_thread(two.primary().kill)
        for session in sessions:
            assert await session.admit(session.request("s", token_ids=list(range(160))))
            assert session.sequence == 2
        resumed = await other.resume_session(sessions[1].session_id, sequence=2)
        assert len(resumed.held_requests) == 2


def test_a_rank_joins_the_shard_of_its_zone(shards: tuple[PairServer, Pair], tmp_path: Path) -> None:
    one, two = shards
    with worker_processes(tmp_path) as workers, connect(one.address, deadline_seconds=DEADLINE_SECONDS) as client:
        workers.start(one.address, 0, 1, "--zone", "z2")
        assert client.wait_until_ready("m", timeout_seconds=DEADLINE_SECONDS).state is PoolState.READY
        assert [info.config.name for info in pools_at(two.primary().address)] == ["m"]
        assert pools_at(one.address) == ()
        session = client.open_session("m", lease_seconds=300)
        assert session.admit(session.request("r", token_ids=list(range(32))))
        with AdminClient(two.primary().address) as admin:
            admin.hand_over()
        workers.started[0].wait_for("server back")
        assert session.admit(session.request("s", token_ids=list(range(32))))


def status_at(server: PairServer, service: str = "AllocatorService") -> str:
    """Returns what the server says of the health of a service."""
    return status_of(ClientCredentials(), server.address, f"kvpool.v1.{service}", DEADLINE_SECONDS)


def pools_at(address: str) -> tuple[PoolInfo, ...]:
    with AdminClient(address, deadline_seconds=DEADLINE_SECONDS) as admin:
        return admin.overview().pools


def test_a_client_stays_at_an_address_that_others_do_not_know(etcd: EtcdCluster, tmp_path: Path) -> None:
    """The advertised address cannot be reached from here, as behind a network of containers."""
    url, socket = f"etcd://{etcd.nodes[0].endpoint}/{tmp_path.name}", f"unix:{tmp_path / 'socket'}"
    options = ["--listen", socket, "--advertise", "192.0.2.1:7"]
    with contextlib.closing(Pair(tmp_path, url, options)) as pair:
        pair.servers[0].start()
        with connect(socket, deadline_seconds=DEADLINE_SECONDS) as client:
            client.create_pool(CONFIG)
            session = client.open_session("m", lease_seconds=300)
            assert session.admit(session.request("r", token_ids=list(range(160))))
        assert [pool["name"] for pool in kvpool("pools", "--address", socket)["pools"]] == ["m"]


def test_a_lost_shard_gets_no_pool_and_is_removed(shards: tuple[PairServer, Pair]) -> None:
    """Its servers come back, and do not serve."""
    one, two = shards
    primary, standby = two.primary(), two.standby()
    assert ask(one, "Place", pool_name="m", zone="z2").shard == "two"
    create(primary, "m")
    refused = refusal("shard", "remove", "two", "--address", one.address)
    assert f"SHARD_REACHABLE: shard: something listens at {primary.address}, an address of shard 'two'" in refused
    assert "OWN_SHARD: shard: " in refusal("shard", "remove", "two", "--address", standby.address)
    primary.kill()
    standby.pause()
    refused = refusal("shard", "remove", "two", "--address", one.address)
    assert f"something listens at {standby.address}" in refused, "its process exists"
    standby.kill()
    until(lambda: [shard.num_pools for shard in ask(one, "ListShards").shards] == [0, 1])
    listed = kvpool("shard", "list", "--address", one.address)["shards"]
    assert [shard["primary_serves"] for shard in listed] == [True, False]
    assert ask(one, "Place", pool_name="new", zone="z2").shard == "one"
    assert ask(one, "Place", pool_name="m", zone="z2").shard == "two", "it stays, until the shard is removed"
    assert kvpool("shard", "remove", "two", "--address", one.address) == {"removed": "two", "pools": 1}
    assert "SHARD_NOT_FOUND" in refusal("shard", "remove", "two", "--address", one.address)
    until(lambda: [shard.name for shard in ask(one, "ListShards").shards] == ["one"])
    with connect(f"{two.seeds},{one.address}", deadline_seconds=DEADLINE_SECONDS, zone="z2") as client:
        client.create_pool(CONFIG)
        session = client.open_session("m", lease_seconds=300)
        for server in two.servers[:2]:
            process = server.start()
            process.wait_for("directory cannot be used.*holds no record of the shard, this server has seen term")
            with pytest.raises(UnavailableError):
                create(server, "m")
        assert session.admit(session.request("r", token_ids=list(range(160))))
        assert [info.config.name for info in pools_at(one.address)] == ["m"]
        assert [shard.name for shard in ask(one, "ListShards").shards] == ["one"]


def test_a_standby_removes_a_lost_shard(shards: tuple[PairServer, Pair]) -> None:
    one, two = shards
    one.kill()
    assert kvpool("shard", "remove", "one", "--address", two.standby().address) == {"removed": "one", "pools": 0}


@pytest.mark.slow
def test_a_primary_that_was_cut_off_while_its_shard_was_removed_ends(
    shards: tuple[PairServer, Pair], etcd: EtcdCluster, tmp_path: Path
) -> None:
    """Neither the other servers nor etcd can reach it meanwhile, and it has a pool."""
    one, _ = shards
    with contextlib.ExitStack() as stack:
        network, closed = Network(etcd.nodes[0].endpoint), stack.enter_context(refusing())
        stack.callback(network.close)
        pair = Pair(
            tmp_path / "three",
            f"etcd://{network.address}/{tmp_path.name}",
            ["--advertise", closed],
            shard_name="three",
        )
        stack.callback(pair.close)
        cut_off = pair.servers[0]
        process = cut_off.start()
        process.wait_for("became primary")
        until(lambda: "three" in {shard.name for shard in ask(one, "ListShards").shards})
        create(cut_off, "m")
        until(lambda: ask(one, "Locate", pool_name="m").shard == "three")
        network.cut()
        process.wait_for("directory cannot be used")
        assert kvpool("shard", "remove", "three", "--address", one.address) == {"removed": "three", "pools": 1}
        create(one, "m")
        assert [info.config.name for info in pools_at(cut_off.address)] == ["m"], "it cannot know yet"
        network.heal()
        process.wait_for("deposed")
        process.wait_for("directory cannot be used.*holds no record of the shard, this server has seen term 1")
        with pytest.raises(UnavailableError):
            create(cut_off, "n")
        assert ask(one, "Locate", pool_name="m").shard == "one"
