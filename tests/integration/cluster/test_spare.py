"""Real servers of a shard, a spare, and a real etcd."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig, connect
from kvpool.core.ids import PoolName
from kvpool.v1 import directory_pb2, directory_pb2_grpc
from support.etcd import EtcdCluster, needs_etcd
from support.pair import Pair, PairServer
from support.server import free_port
from support.waiting import DEADLINE_SECONDS

pytestmark = needs_etcd

CONFIG = PoolConfig(PoolName("m"), 500, 4096, (KVCacheGroup(FullAttentionSpec(16), ("layer",)),))
PROMPT = list(range(160))
OPTIONS = ("--adopt-seconds", "1", "--takeover-seconds", "60", "--standby-timeout-seconds", "60")
"""No server must lose its role because the machine is busy."""


@pytest.fixture
def pair(etcd: EtcdCluster, tmp_path: Path) -> Iterator[Pair]:
    """A pair that runs."""
    pair = Pair(tmp_path, f"etcd://{etcd.nodes[0].endpoint}/{tmp_path.name}", OPTIONS)
    try:
        pair.start()
        yield pair
    finally:
        pair.close()


@pytest.fixture
def spare(pair: Pair) -> PairServer:
    """A spare that does not run yet."""
    return pair.add("--spare")


def test_a_spare_takes_the_place_of_a_standby_and_then_of_the_primary(pair: Pair, spare: PairServer) -> None:
    primary, standby = pair.primary(), pair.standby()
    with connect(pair.seeds, deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(CONFIG)
        session = client.open_session("m", lease_seconds=300)
        request = session.request("r", token_ids=PROMPT)
        assert session.admit(request)
        session.mark_executed()
        spare.start().wait_for("kvpool: listening")
        standby.kill()
        pair.wait_members(primary, spare)
        spare.kill()  # its supervisor restarts it
        pair.wait_members(primary)
        spare.start()
        pair.wait_members(primary, spare)
        blocks = list(request.block_ids[0])
        primary.kill()
        request.append([1])
        assert session.allocate_slots(request, 1)
        assert request.block_ids[0][: len(blocks)] == blocks
        other = session.request("other", token_ids=[*PROMPT, 1])
        assert session.get_computed_blocks(other).num_tokens == len(PROMPT)
        for server in (primary, standby):
            server.start()
        pair.wait_members(spare, primary, standby)


@pytest.mark.slow
def test_a_spare_leaves_when_the_standby_is_back_and_helps_again(pair: Pair, spare: PairServer) -> None:
    primary, standby = pair.primary(), pair.standby()
    spare.start()
    for number in (1, 2):
        standby.kill()
        pair.wait_members(primary, spare)
        standby.start()
        spare.process.wait_for("left the shard", count=number)
        pair.wait_members(primary, standby)
    spare.process.wait_for("kvpool: listening", count=5)  # it has started again
    assert [path.name for path in spare.folder.iterdir()] == ["lock"]
    assert spare.process.stop() == 0


@pytest.mark.slow
def test_one_of_several_spares_adopts_a_shard_and_another_one_replaces_it(pair: Pair) -> None:
    primary, standby = pair.primary(), pair.standby()
    spares = [pair.add("--spare") for _ in range(3)]
    for spare in spares:
        spare.start().wait_for("kvpool: listening")
    standby.kill()
    while spares:
        adopted = pair.wait_for(lambda: next((spare for spare in spares if is_member(primary, spare)), None), "a spare")
        pair.wait_members(primary, adopted)
        adopted.kill()
        spares.remove(adopted)
        pair.wait_members(primary)


def is_member(primary: PairServer, server: PairServer) -> bool:
    shard = primary.shard()
    return shard is not None and any(server.address in member.addresses for member in shard.members)


def test_a_spare_without_a_shard_says_so(pair: Pair, spare: PairServer) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    process = spare.start(environment={"KVPOOL_SERVE_METRICS_LISTEN": metrics})
    process.wait_for("kvpool: listening")
    assert page(metrics, "readyz") == "ok; spare: waits for a shard\n"
    exported = page(metrics, "metrics")
    assert f'kvpool_spare{{cluster="{spare.folder.parent.name}"}} 1.0' in exported
    assert "kvpool_shard_" not in exported
    with grpc.insecure_channel(spare.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        states = [
            health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_SECONDS).status
            for service in ("", "kvpool.v1.AllocatorService")
        ]
        assert states == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
        stub = directory_pb2_grpc.DirectoryServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListShards(directory_pb2.ListShardsRequest(), timeout=DEADLINE_SECONDS)
    refusal: grpc.Call = caught.value  # type: ignore[assignment]  # as gRPC documents
    assert refusal.code() is grpc.StatusCode.UNAVAILABLE
    assert refusal.details() == "the server is a spare, which waits for a shard"
    with connect(f"{spare.address},{pair.seeds}", deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(CONFIG)  # the client goes on to the other servers
    assert process.stop() == 0


def test_a_spare_waits_for_an_etcd_that_does_not_answer(tmp_path: Path) -> None:
    pair = Pair(tmp_path, f"etcd://127.0.0.1:{free_port()}/c")
    metrics = f"127.0.0.1:{free_port()}"
    spare = pair.add("--spare", "--metrics-listen", metrics)
    try:
        spare.start().wait_for("directory cannot be used")
        with pytest.raises(urllib.error.HTTPError) as caught:
            page(metrics, "readyz")
        assert caught.value.code == 503
        assert caught.value.read().startswith(b"spare: cannot use the directory: ")
        assert spare.process.stop() == 0
        assert "Traceback" not in "".join(spare.process.lines)
    finally:
        pair.close()


def page(address: str, name: str) -> str:
    with urllib.request.urlopen(f"http://{address}/{name}", timeout=DEADLINE_SECONDS) as answer:
        return str(answer.read().decode())
