"""/metrics of a real server, scraped over HTTP while real sessions work."""

import signal
import socket
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
from support.auth import Authority, secret_of, write_tokens
from support.bugs import bugs_in
from support.command import kvpool
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


def test_metrics_match_get_pool(client: Client, served: Served) -> None:
    """Those of which no unit test counts any."""
    client.create_pool(pool_config("figures", num_blocks=20))
    with grpc.insecure_channel(served[0]) as channel, client.open_session("figures") as session:
        for name, prompt in (("x", [9] * 20), ("a", PROMPT), ("b", PROMPT)):
            request = session.request(name, prompt)
            assert session.admit(request)
            session.mark_executed()
            if name != "b":
                session.free(request)
        assert session.admit(session.request("big", [7] * 60)) is None
        assert session.admit(session.request("d", [5] * 26))
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        other = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="figures", lease_seconds=1.0)).session
        for _ in range(3):
            stub.ResetPrefixCache(allocator_pb2.ResetPrefixCacheRequest(session_id=other.session_id, sequence=1))
        wait_until(lambda: client.get_pool("figures").sessions == 1, "a lease is over")
        info, samples = client.get_pool("figures"), scrape(served[1])
    figures = {
        "pool_free_blocks": info.free_blocks,
        "prefix_cache_hit_tokens_total": info.prefix_cache.hits_tokens,
        "evicted_blocks_total": info.evicted_blocks,
        "block_lifetime_seconds_count": info.evicted_blocks,
        "allocation_refusals_total": info.activity.refusals,
        "steps_total": info.activity.steps,
        "step_retries_total": 2,
        "block_reuse_gap_seconds_count": 10,
    }
    of_pool = frozenset({("pool", "figures")})
    assert {name: samples[f"kvpool_{name}", of_pool] for name in figures} == figures
    assert 0 not in figures.values()
    assert samples["kvpool_sessions_ended_total", frozenset({("pool", "figures"), ("reason", "lease_expired")})] == 1
    assert samples["kvpool_step_seconds_count", of_pool] == samples["kvpool_step_operations_count", of_pool] > 0


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


def listening_ports(pid: int) -> list[int]:
    """The TCP ports on which a process listens."""
    files = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return [int(row[1][-4:], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in files]


def test_metrics_are_off_by_default() -> None:
    with ServerProcess("127.0.0.1:0") as server:
        assert len(listening_ports(server.pid)) == 2, "for gRPC and for steps"


def test_a_port_in_use_ends_the_start_with_a_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = kvpool("serve", "--listen", "127.0.0.1:0", "--metrics-listen", address)
    assert done.returncode == 1
    assert f"cannot serve metrics on {address}: Address already in use" in done.stderr


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
