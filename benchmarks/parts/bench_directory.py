"""Measures the directory of a large cluster: 10,000 pools on 100 shards, whose servers are simulated.

They have records, and one listener that accepts connections at all their addresses. Two real servers are the pair of
one more shard. Prints one JSON: how long it takes to place a pool, with the probe of its shard, to start a server
beside an empty and beside the large directory, and to answer Locate; how evenly the pools are placed; and how often
etcd is written while nothing changes but a session steps. etcd has three nodes. All processes share the cores of this
machine. Needs etcd.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from benchmarks.parts.bench_cluster import WAIT_SECONDS, Process, member, wait_for_standby
from benchmarks.parts.bench_metrics import Decodes
from kvpool.client import connect
from kvpool.core.ids import PoolName
from kvpool.server.cluster.directory import Changes, Member, MemberId, ShardName, ShardRecord
from kvpool.server.cluster.directory_cache import DirectoryCache
from kvpool.server.cluster.etcd_config import EtcdConfig
from kvpool.server.cluster.etcd_directory import EtcdDirectory
from kvpool.server.cluster.pool_claims import Placement
from kvpool.v1 import directory_pb2, directory_pb2_grpc
from support.etcd import EtcdCluster

PICK = random.Random(7).randrange  # noqa: S311 - repeatable


def in_ms(seconds: list[float]) -> dict[str, float]:
    """Mean, median and p99 of durations."""
    ordered = sorted(seconds)
    figures = statistics.fmean(ordered), statistics.median(ordered), ordered[int(len(ordered) * 0.99)]
    return {name: round(each * 1000, 3) for name, each in zip(("mean_ms", "p50_ms", "p99_ms"), figures, strict=True)}


async def fill(etcd: EtcdCluster, num_shards: int, num_pools: int) -> tuple[list[float], DirectoryCache]:
    """Writes records of shards, and places pools one after the other. Returns the durations, and what was written."""
    directory, view = EtcdDirectory(EtcdConfig(etcd.endpoints)), DirectoryCache()
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "0.0.0.0", 0)  # noqa: S104 - all of 127/8
    port = listener.sockets[0].getsockname()[1]
    for number in range(num_shards):
        hosts = {i: f"127.{100 + i}.{number // 250}.{number % 250 + 1}" for i in (1, 2)}
        members = tuple(
            Member(MemberId(f"m{number}-{i}"), (f"{host}:{port}",), f"{host}:50060", f"zone-{i}")
            for i, host in hosts.items()
        )
        record = ShardRecord(1, members[0].member_id, members, f"c{number}")
        shard = ShardName(f"s{number}")
        swap = await directory.compare_and_swap(shard, 0, record)
        view.take(Changes(is_whole=False, shards={shard: swap.entry}, pools={}))
    took, placement = [], Placement(ShardName("own"), num_pools, PICK)
    for number in range(num_pools):
        pool, start = PoolName(f"model-{number}"), time.perf_counter()
        shard = await placement.choose(view.shards, view.num_pools, "")
        await directory.claim_pool(pool, shard)
        took.append(time.perf_counter() - start)
        view.take(Changes(is_whole=False, shards={}, pools={pool: shard}))
    listener.close()
    await directory.close()
    return took, view


@contextlib.contextmanager
def stub_of(address: str) -> Iterator[directory_pb2_grpc.DirectoryServiceStub]:
    """The directory service of a server."""
    with grpc.insecure_channel(address) as channel:
        yield directory_pb2_grpc.DirectoryServiceStub(channel)


def start_seconds(server: Process, start: float) -> float:
    """Waits until a server knows the directory. Returns the time since its process was started."""
    request = directory_pb2.ListShardsRequest()
    with stub_of(server.address) as stub:
        while time.perf_counter() < start + WAIT_SECONDS:
            with contextlib.suppress(grpc.RpcError):
                if stub.ListShards(request, timeout=WAIT_SECONDS, wait_for_ready=True).shards:
                    return time.perf_counter() - start
    raise TimeoutError("the server does not know the directory")


def locate(address: str, num_pools: int, calls: int) -> list[float]:
    """Locates random pools, one call after the other. Returns the durations."""
    took = []
    with stub_of(address) as stub:
        for _ in range(calls + 50):
            request = directory_pb2.LocateRequest(pool_name=f"model-{PICK(num_pools)}")
            start = time.perf_counter()
            stub.Locate(request, timeout=WAIT_SECONDS)
            took.append(time.perf_counter() - start)
    return took[50:]


def revision(etcd: EtcdCluster) -> int:
    """Number of writes that etcd has seen."""
    return int(etcd.post("kv/range", key=b"none")["header"]["revision"])


def figures(num_shards: int, num_pools: int, rest_seconds: float) -> dict[str, object]:
    """Runs all measurements."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        etcd = EtcdCluster(folder / "etcd", 3)
        stack.callback(etcd.kill)
        revision(etcd)  # it has a leader
        starts = {}
        for name in ("empty", "full"):
            if name == "full":
                took, view = asyncio.run(fill(etcd, num_shards, num_pools))
            start = time.perf_counter()
            server = member(folder / name, etcd, name, "--zone", name)
            stack.callback(server.kill)
            starts[name] = round(start_seconds(server, start), 3)
        standby = member(folder / "standby", etcd, "full")
        stack.callback(standby.kill)
        wait_for_standby(server)
        alone = locate(server.address, num_pools, 5000)
        with ThreadPoolExecutor(16) as threads:
            each = threads.map(lambda _: locate(standby.address, num_pools, 500), range(16))
            together = [seconds for part in each for seconds in part]
        # In the zone of the real server: the servers of the other shards answer nothing.
        client = stack.enter_context(connect(server.address, deadline_seconds=WAIT_SECONDS, zone="full"))
        decodes = Decodes(client, 100_000)
        before, due = revision(etcd), time.perf_counter() + rest_seconds
        steps = 0
        while time.perf_counter() < due:
            decodes.step()
            steps += 1
        counts = view.num_pools.values()
        return {
            "place": in_ms(took),
            "pools_per_shard": {"least": min(counts), "most": max(counts), "mean": num_pools / num_shards},
            "start_seconds": starts,
            "locate_one_client": in_ms(alone),
            "locate_16_clients_standby": in_ms(together),
            "at_rest": {"seconds": rest_seconds, "steps": steps, "etcd_writes": revision(etcd) - before},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--pools", type=int, default=10_000)
    parser.add_argument("--rest-seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    print(json.dumps(figures(arguments.shards, arguments.pools, arguments.rest_seconds)))  # noqa: T201 - the output


if __name__ == "__main__":
    main()
