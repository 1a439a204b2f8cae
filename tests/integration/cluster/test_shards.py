"""Two shards of one cluster, real servers and a real etcd: where pools are, and how primaries move."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig, connect
from kvpool.core.errors import UnavailableError, WrongStateError
from kvpool.core.ids import PoolName
from kvpool.v1 import directory_pb2, directory_pb2_grpc
from kvpool.wire.errors import from_rpc_error
from support.etcd import EtcdCluster, etcd_cluster, needs_etcd
from support.pair import WAIT_SECONDS, Pair, PairServer

pytestmark = needs_etcd

CONFIG = PoolConfig(PoolName("m"), 500, 4096, (KVCacheGroup(FullAttentionSpec(16), ("layer",)),))
KVPOOL = str(Path(sys.executable).parent / "kvpool")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster() as cluster:
        yield cluster


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
        until(lambda server=server: {shard.name for shard in ask(server, "ListShards").shards} == {"one", "two"})  # type: ignore[misc]


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition. A server that has not read the directory yet answers UNAVAILABLE."""
    due = time.monotonic() + WAIT_SECONDS
    while True:
        with contextlib.suppress(UnavailableError):
            if condition():
                return
        assert time.monotonic() < due
        time.sleep(0.02)


def ask(server: PairServer, method: str, **fields: Any) -> Any:
    """Calls DirectoryService of a server. Raises its errors."""
    request = getattr(directory_pb2, f"{method}Request")(**fields)
    with grpc.insecure_channel(server.address) as channel:
        stub = directory_pb2_grpc.DirectoryServiceStub(channel)
        try:
            return getattr(stub, method)(request, timeout=WAIT_SECONDS, wait_for_ready=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error, server.address, "") from None


def kvpool(*arguments: str) -> Any:
    """Runs a command with --json."""
    done = subprocess.run([KVPOOL, *arguments, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_pool_belongs_to_one_shard(shards: tuple[PairServer, Pair]) -> None:
    one, two = shards
    primary, standby = two.primary(), two.standby()
    for number, server in enumerate((one, primary, standby)):
        placed = ask(server, "Place", pool_name=f"p{number}", zone="z2")
        assert placed.shard == "two"
        assert list(placed.addresses) == [primary.address, standby.address]
    with connect(one.address) as client:
        with pytest.raises(WrongStateError, match=f"pool 'p0' belongs to shard 'two', at {primary.address}") as caught:
            client.create_pool(replace(CONFIG, name=PoolName("p0")))
        assert caught.value.reason == "OTHER_SHARD"
        client.create_pool(CONFIG)  # without Place: it stays where the caller is
        assert client.get_pool("m").config.num_blocks == CONFIG.num_blocks
    with connect(two.seeds) as client:
        with pytest.raises(WrongStateError, match="pool 'm' belongs to shard 'one'"):
            client.create_pool(CONFIG)
        client.create_pool(replace(CONFIG, name=PoolName("p0")))
    for server in (one, primary, standby):
        assert ask(server, "Locate", pool_name="m").shard == "one"
        located = ask(server, "Locate", pool_name="p0")
        assert (located.shard, list(located.primary_addresses)) == ("two", [primary.address])
    listed = kvpool("shard", "list", "--address", standby.address)["shards"]
    assert [(shard["name"], shard["num_pools"]) for shard in listed] == [("one", 1), ("two", 3)]


def test_a_primary_moves_with_its_pools(shards: tuple[PairServer, Pair]) -> None:
    one, two = shards
    primary, standby = two.primary(), two.standby()
    with connect(two.seeds, deadline_seconds=WAIT_SECONDS) as client:
        client.create_pool(CONFIG)
        session = client.open_session("m", lease_seconds=300)
        request = session.request("r", token_ids=list(range(160)))
        assert session.admit(request)
        moved = kvpool("shard", "move", "two", standby.address, "--address", one.address)
        assert moved["primary"] == [standby.address]
        assert kvpool("shard", "move", "two", standby.address, "--address", one.address) == moved, "it is there"
        request.append([1])
        assert session.allocate_slots(request, 1)
        assert session.epoch == client.get_pool("m").epoch
    until(lambda: list(ask(one, "Locate", pool_name="m").primary_addresses) == [standby.address])
    two.wait_in_sync()
    refused = subprocess.run(
        [KVPOOL, "shard", "move", "two", one.address, "--address", one.address, "--wait-seconds", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert refused.returncode == 1
    assert f"NO_STANDBY: HOST:PORT: no server of shard two at {one.address} is in sync" in refused.stderr
    assert kvpool("shard", "balance", "--dry-run", "--address", primary.address) == {"moves": [], "dry_run": True}
