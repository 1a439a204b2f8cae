"""Clients without permission, or that send no request, cannot block other clients."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from kvpool.client import connect
from kvpool.server.auth.permissions import RULES
from kvpool.server.guard.request_reader import MAX_PENDING_OPEN_CALLS
from kvpool.server.services.standard_service import MAX_HEALTH_WATCHES, MAX_REFLECTION_STREAMS
from kvpool.wire.errors import from_rpc_error
from support.auth import Entry, Silent, channel, secret_of, write_tokens
from support.server import pool_config, server_process
from support.waiting import DEADLINE_SECONDS

CHECK = "grpc.health.v1.Health/Check"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GET_POOL = "kvpool.v1.AllocatorService/GetPool"
TOKENS: list[Entry] = [{"name": name, "role": "admin", "pools": ["*"]} for name in ("ops", "other")]
FOREVER = {"stall_seconds": 3600.0}


@contextmanager
def guarded_server(folder: Path, **limits: float) -> Iterator[str]:
    write_tokens(folder / "tokens.toml", TOKENS)
    address = f"unix:{folder / 's'}"
    with server_process(address, auth={"tokens": str(folder / "tokens.toml")}, limits=limits):
        yield address


def is_serving(opened: grpc.Channel) -> bool:
    answer = health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_unauthorized_calls_are_refused_before_their_request_arrives(tmp_path: Path) -> None:
    with guarded_server(tmp_path, **FOREVER) as address, channel(address) as opened:
        assert {Silent(opened, method).error().reason for method in RULES} == {"NO_TOKEN"}


@pytest.mark.parametrize("method", [CHECK, GET_POOL, "kvpool.v1.EventService/Watch"])
def test_a_missing_request_times_out(tmp_path: Path, method: str) -> None:
    with (
        guarded_server(tmp_path, stall_seconds=0.2) as address,
        channel(address, secret_of("ops")) as opened,
    ):
        assert Silent(opened, method).error().reason == "NOTHING_SENT"


def test_a_token_revoked_before_the_request_arrives_is_refused(tmp_path: Path) -> None:
    with guarded_server(tmp_path, **FOREVER) as address, connect(address, token=secret_of("other")) as other:
        other.create_pool(pool_config())
        with channel(address, secret_of("ops")) as opened:
            assert is_serving(opened)  # connected: later messages arrive in order
            call = Silent(opened, "kvpool.v1.AdminService/RemovePool")
            assert is_serving(opened)  # the server has seen the call before
            write_tokens(tmp_path / "tokens.toml", TOKENS[1:])
            other.get_pool("m")  # the server checks the file
            call.send(b"\n\x01m")
            assert call.error().reason == "TOKEN_REVOKED"
        assert other.get_pool("m").config.name == "m"


def test_pending_calls_without_a_token_yield_to_a_complete_one(tmp_path: Path) -> None:
    with (
        guarded_server(tmp_path, max_calls=MAX_PENDING_OPEN_CALLS + 8, **FOREVER) as address,
        channel(address) as opened,
        connect(address, token=secret_of("ops")) as client,
    ):
        ended: queue.SimpleQueue[Silent] = queue.SimpleQueue()
        silent = {Silent(opened, CHECK, ended) for _ in range(MAX_PENDING_OPEN_CALLS)}
        for _ in range(3 * MAX_PENDING_OPEN_CALLS):
            silent.add(Silent(opened, CHECK, ended))
            call = ended.get(timeout=DEADLINE_SECONDS)  # gRPC may deliver two new calls in the other order
            assert call.error().reason == "NOTHING_SENT"
            silent.remove(call)
        assert is_serving(opened)
        client.create_pool(pool_config())
        for call in silent:
            call.close()


def test_pending_calls_of_one_host_do_not_displace_those_of_another(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.toml", TOKENS)
    addresses = (f"unix:{tmp_path / 's'}", "127.0.0.1:0")
    auth = {"tokens": str(tmp_path / "tokens.toml")}
    with (
        server_process(*addresses, auth=auth, limits=FOREVER) as server,
        channel(server.addresses[0]) as near,
        channel(server.addresses[1]) as far,
    ):
        slow = Silent(near, CHECK)
        assert is_serving(near)  # on the same connection: the server has seen the call before
        ended: queue.SimpleQueue[Silent] = queue.SimpleQueue()
        silent = [Silent(far, CHECK, ended) for _ in range(2 * MAX_PENDING_OPEN_CALLS)]
        assert {ended.get(timeout=DEADLINE_SECONDS).error().reason for _ in range(MAX_PENDING_OPEN_CALLS)} == {
            "NOTHING_SENT"
        }
        slow.send(b"")
        slow.answer()
        for call in silent:
            call.close()


def test_health_watches_are_limited_and_checks_still_answered(tmp_path: Path) -> None:
    with guarded_server(tmp_path) as address, channel(address) as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        watches = []
        for _ in range(MAX_HEALTH_WATCHES):  # one by one: calls whose request has not arrived are limited, too
            watches.append(stub.Watch(health_pb2.HealthCheckRequest()))
            next(watches[-1])
        with pytest.raises(grpc.RpcError, match="64 health watches") as caught:
            next(stub.Watch(health_pb2.HealthCheckRequest()))
        error = from_rpc_error(caught.value)
        assert (error.reason, error.retry_seconds) == ("TOO_MANY_STREAMS", 1.0)
        assert is_serving(opened)
        for watch in watches:
            watch.cancel()
        assert is_serving(opened)  # on the same connection: the server has seen that, too
        again = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(again).status == health_pb2.HealthCheckResponse.SERVING
        again.cancel()


def test_reflection_streams_are_limited(tmp_path: Path) -> None:
    with guarded_server(tmp_path) as address, channel(address, secret_of("ops")) as opened:
        asked = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        streams = [Silent(opened, REFLECTION) for _ in range(MAX_REFLECTION_STREAMS)]
        for stream in streams:
            stream.send(asked)
            stream.answer()
        assert Silent(opened, REFLECTION).error().reason == "TOO_MANY_STREAMS"
        for stream in streams:
            stream.close()
