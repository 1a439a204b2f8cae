"""/metrics of a real server, scraped over HTTP while real sessions work."""

import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.client import Client, NotFoundError, UnauthenticatedError, connect
from kvpool.core.errors import ExhaustedError
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, step_pb2
from support import processes
from support.auth import Authority, secret_of, write_tokens
from support.bugs import bugs_in
from support.scrape import scrape
from support.server import ServerProcess, free_port, pool_config, running_server
from support.waiting import DEADLINE_SECONDS, wait_until

PROMPT = list(range(42))
Served = tuple[str, int]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    port = free_port()
    metrics = {"address": f"127.0.0.1:{port}", "block_sample_rate": 1.0}
    with running_server(metrics=metrics, max_pools=12) as address:
        yield address, port


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with connect(served[0]) as client:
        yield client


def values(port: int, pool: str) -> dict[str, float]:
    """Samples without labels except the pool, by name."""
    only = frozenset({("pool", pool)})
    return {name: value for (name, labels), value in scrape(port).items() if labels == only}


def test_metrics_match_get_pool(client: Client, served: Served) -> None:
    client.create_pool(pool_config("figures", num_blocks=20))
    with client.open_session("figures") as session:
        for name, prompt in (("x", [9] * 20), ("a", PROMPT), ("b", PROMPT), ("c", PROMPT)):
            request = session.request(name, prompt)
            assert session.admit(request)
            session.mark_executed()
            if name != "c":
                session.free(request)
        assert session.admit(session.request("big", [7] * 60)) is None
        other = session.request("d", [5] * 30)
        assert session.admit(other)
        info, exported = client.get_pool("figures"), values(served[1], "figures")
        samples = scrape(served[1])
    assert info.evicted_blocks == 5
    assert exported["kvpool_pool_free_blocks"] == info.free_blocks
    assert exported["kvpool_pool_used_blocks"] == 19 - info.free_blocks
    assert exported["kvpool_pool_cached_blocks"] == info.cached_blocks
    assert exported["kvpool_pool_usage_ratio"] == pytest.approx(info.usage)
    assert exported["kvpool_prefix_cache_hit_tokens_total"] == info.prefix_cache.hits_tokens == 80
    assert exported["kvpool_prefix_cache_queried_tokens_total"] == info.prefix_cache.queries_tokens
    assert exported["kvpool_prefix_cache_recent_hit_ratio"] == pytest.approx(info.recent_hit_rate)
    assert (
        exported["kvpool_evicted_blocks_total"]
        == exported["kvpool_block_lifetime_seconds_count"]
        == info.evicted_blocks
    )
    assert exported["kvpool_allocation_refusals_total"] == info.activity.refusals == 1
    assert exported["kvpool_steps_total"] == info.activity.steps
    assert exported["kvpool_block_reuse_gap_seconds_count"] == 2 * 10
    assert exported["kvpool_step_seconds_count"] == exported["kvpool_step_operations_count"] > 0
    assert (
        samples["kvpool_requests", frozenset({("pool", "figures"), ("state", "running")})] == info.running_requests == 2
    )
    assert samples["kvpool_requests", frozenset({("pool", "figures"), ("state", "waiting")})] == 1


def counted_calls(port: int) -> set[tuple[str, str]]:
    """Methods and codes of the calls that were counted."""
    return {
        (dict(labels)["method"].rpartition("/")[2], dict(labels)["code"])
        for name, labels in scrape(port)
        if name == "kvpool_rpcs_total"
    }


def test_calls_are_counted_by_code_and_unknown_methods_are_not(client: Client, served: Served) -> None:
    with pytest.raises(NotFoundError):
        client.get_pool("nowhere")
    with grpc.insecure_channel(served[0]) as channel:
        for name in ("Nonsense", "More"):
            call: Any = channel.unary_unary(f"/kvpool.v1.AllocatorService/{name}")
            with pytest.raises(grpc.RpcError):
                call(b"")
        stream = allocator_pb2_grpc.AllocatorServiceStub(channel).Schedule(iter([step_pb2.Step(session_id="unknown")]))
        with pytest.raises(grpc.RpcError):
            next(stream)
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        request = allocator_pb2.WaitUntilReadyRequest(pool_name="nowhere", timeout_seconds=DEADLINE_SECONDS)
        wanted = {("GetPool", "NOT_FOUND"), ("Schedule", "NOT_FOUND"), ("WaitUntilReady", "CANCELLED")}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not wanted <= (counted := counted_calls(served[1])):
            assert time.monotonic() < deadline, counted
            waiting = stub.WaitUntilReady.future(request)
            time.sleep(0.2)  # a call that is cancelled before the server begins it is not counted
            waiting.cancel()
    assert not {"Nonsense", "More"} & {method for method, _ in counted}


def test_retries_and_lease_expiries_are_counted(client: Client, served: Served) -> None:
    client.create_pool(pool_config("leases"))
    with grpc.insecure_channel(served[0]) as channel:
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        session_id = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="leases")).session.session_id
        for _ in range(3):
            stub.ResetPrefixCache(allocator_pb2.ResetPrefixCacheRequest(session_id=session_id, sequence=1))
        exported = values(served[1], "leases")
        assert (exported["kvpool_steps_total"], exported["kvpool_step_retries_total"]) == (1, 2)
        stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id=session_id))
        stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="leases", lease_seconds=1.0))
    ended = ("kvpool_sessions_ended_total", frozenset({("pool", "leases"), ("reason", "lease_expired")}))
    wait_until(lambda: scrape(served[1])[ended] == 1, "its lease is over")
    assert values(served[1], "leases")["kvpool_sessions"] == 0


def test_a_pool_above_the_limit_is_refused_without_changes() -> None:
    port = free_port()
    with running_server(metrics={"address": f"127.0.0.1:{port}"}, max_pools=1) as address, connect(address) as client:
        client.create_pool(pool_config("one"))
        with pytest.raises(ExhaustedError) as refusal:
            client.create_pool(pool_config("two"))
        assert refusal.value.reason == "TOO_MANY_POOLS"
        client.create_pool(pool_config("one"))
        pools = {dict(labels).get("pool") for _, labels in scrape(port)} - {None}
    assert pools == {"one"}


def test_a_server_exports_its_credentials_limits_and_refusals(tmp_path: Path) -> None:
    port, authority, tokens = free_port(), Authority(tmp_path, "ours"), tmp_path / "tokens.toml"
    pair = authority.issue("localhost", days=30)
    entry = {"name": "s", "role": "scheduler", "pools": ["*"]}
    write_tokens(tokens, [{**entry, "expires": "9999-12-31"}, {**entry, "name": "old", "expires": "2020-01-01"}])
    auth = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tokens": str(tokens)}
    limits = {"max_total_blocks": 40, "max_memory_bytes": 2**33}
    with ServerProcess(
        "localhost:0", metrics={"address": f"127.0.0.1:{port}"}, auth=auth, limits=limits, max_pools=4
    ) as server:

        def exported(label: str) -> dict[tuple[str, str], float]:
            return {
                (name, value): number
                for (name, labels), number in scrape(port).items()
                for key, value in labels
                if key == label
            }

        before = exported("kind")
        assert before["kvpool_credentials_expire_timestamp_seconds", "tokens"] == 253402300800
        left_seconds = before["kvpool_credentials_expire_timestamp_seconds", "certificates"] - time.time()
        assert 29 * 86_400 < left_seconds < 30 * 86_400
        tls = authority.trusted_by()
        with connect(server.addresses[0], tls=tls, token=secret_of("s")) as client:
            client.create_pool(pool_config("a", 30))
            with pytest.raises(ExhaustedError):
                client.create_pool(pool_config("b", 11))
        with (
            connect(server.addresses[0], tls=tls, token=secret_of("old")) as client,
            pytest.raises(UnauthenticatedError),
        ):
            client.get_pool("a")
        reasons, limit = exported("reason"), exported("limit")
    assert {key: count for key, count in reasons.items() if count and "refusals" in key[0]} == {
        ("kvpool_limit_refusals_total", "TOO_MANY_BLOCKS"): 1,
        ("kvpool_door_refusals_total", "TOKEN_EXPIRED"): 1,
    }
    assert (limit["kvpool_limit_usage_ratio", "max_total_blocks"], limit["kvpool_limit_usage_ratio", "max_pools"]) == (
        0.75,
        0.25,
    )
    assert 0 < limit["kvpool_limit_usage_ratio", "max_memory_bytes"] < 0.5


def test_metrics_are_off_by_default() -> None:
    with ServerProcess("127.0.0.1:0") as server:
        listening = processes.run(
            [sys.executable, "-c", _SOCKETS, str(server.pid)], capture_output=True, text=True, check=True
        )
        assert json.loads(listening.stdout) == [int(server.addresses[0].rpartition(":")[2])]


_SOCKETS = """
import json, os, sys
inodes = set()
for fd in os.listdir(f"/proc/{sys.argv[1]}/fd"):
    try:
        inodes.add(os.readlink(f"/proc/{sys.argv[1]}/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
    except OSError:
        pass
ports = set()
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/{sys.argv[1]}/net/{table}").read().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A" and columns[9] in inodes:
            ports.add(int(columns[1].rpartition(":")[2], 16))
print(json.dumps(sorted(ports)))
"""


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--metrics-listen", "9464"], "--metrics-listen: address '9464': needs host:port"),
        (["--metrics-listen", "unix:/tmp/m"], "address 'unix:/tmp/m': needs host:port"),
        (["--block-sample-rate", "1.5"], "--block-sample-rate: 1.5 is not in [0, 1]"),
        (["--max-pools", "0"], "--max-pools: 0 is not in [1, 1048576]"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(option: list[str], words: str) -> None:
    command = [processes.KVPOOL, "serve", "--listen", "127.0.0.1:0", *option]
    done = processes.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_ends_the_start_with_a_message() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [processes.KVPOOL, "serve", "--listen", "127.0.0.1:0"]
        done = processes.run(
            [*command, "--metrics-listen", f"127.0.0.1:{port}"],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
    assert done.returncode == 1
    assert f"cannot serve metrics on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_under_scrapes_stops_cleanly() -> None:
    port = free_port()
    server = ServerProcess("127.0.0.1:0", metrics={"address": f"127.0.0.1:{port}", "vllm_names": True})
    with connect(server.addresses[0]) as client:
        client.create_pool(pool_config("one"))
    assert ("vllm:kv_cache_usage_perc", frozenset({("model_name", "one")})) in scrape(port)
    server.signal(signal.SIGTERM)
    while server.is_alive:
        try:
            scrape(port)
        except (OSError, HTTPException):
            break
    assert (server.end(), bugs_in(server.log)) == (0, []), server.log  # no second signal: that would end it at once
