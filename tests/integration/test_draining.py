"""Draining and stopping a server during a rolling upgrade: real processes, signals and commands."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvpool.client import Client, Session, connect
from kvpool.client.admin import AdminClient
from kvpool.core.errors import InvalidArgumentError, UnavailableError
from kvpool.v1 import admin_pb2, admin_pb2_grpc, allocator_pb2, allocator_pb2_grpc
from kvpool.v1.pool_pb2 import PoolState
from kvpool.wire.errors import from_rpc_error
from support import processes
from support.server import ServerProcess, pool_config
from support.waiting import DEADLINE_SECONDS, wait_until


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path / 's'}"


@pytest.fixture
def server(address: str) -> Iterator[ServerProcess]:
    with ServerProcess(address, drain_seconds=30.0) as server:
        yield server
        server.kill()


@pytest.fixture
def client(server: ServerProcess, address: str) -> Iterator[Client]:
    assert server.addresses == [address]
    with connect(address, deadline_seconds=5) as client:
        client.create_pool(pool_config())
        yield client


def works(session: Session, request_id: str) -> bool:
    """Whether a session can still allocate blocks."""
    return session.admit(session.request(request_id, list(range(20)))) is not None


def wait_until_draining(client: Client) -> None:
    """Waits until the server has accepted the stop and refuses sessions."""
    wait_until(lambda: client.get_pool("m").state == PoolState.POOL_STATE_DRAINING, "the server drains")
    with pytest.raises(UnavailableError, match="about to stop"):
        client.open_session("m")


def test_an_operators_stop_waits_for_the_sessions(server: ServerProcess, client: Client, address: str) -> None:
    with client.open_session("m") as session:
        command = [processes.KVPOOL, "drain", "--stop", "--wait", "--json", "--address", address]
        waiting = processes.start(command, stdout=processes.PIPE, text=True)
        wait_until_draining(client)
        assert works(session, "while it drains")
        assert server.is_alive
        assert waiting.poll() is None
    said, _ = waiting.communicate(timeout=DEADLINE_SECONDS)
    assert (waiting.returncode, json.loads(said)) == (0, {"stopped": True, "sessions": 1})
    assert server.end() == 0


def test_a_stop_is_cancelled(server: ServerProcess, client: Client, address: str) -> None:
    with client.open_session("m") as session, AdminClient(address) as admin:
        admin.stop(60.0)
        wait_until_draining(client)
        assert admin.overview().server.draining
        assert admin.undrain() == ()
        assert not admin.overview().server.draining
        assert works(session, "r")
        client.open_session("m").close()
    assert server.is_alive


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stop": True, "pool_name": "m"}, "pool_name"),
        ({"stop": True, "timeout_seconds": 86_401.0}, "timeout_seconds"),
        ({"timeout_seconds": 1.0}, "timeout_seconds"),
    ],
)
def test_an_invalid_stop_changes_nothing(client: Client, address: str, fields: dict[str, object], field: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Drain(admin_pb2.DrainRequest(**fields), timeout=DEADLINE_SECONDS)  # type: ignore[arg-type]
        error = from_rpc_error(raised.value)
        assert (type(error), error.field) == (InvalidArgumentError, field)
        assert not stub.ListPools(admin_pb2.ListPoolsRequest(), timeout=DEADLINE_SECONDS).server.draining
    client.open_session("m").close()


def test_a_signal_lets_sessions_end_and_takes_no_new_ones(server: ServerProcess, client: Client, address: str) -> None:
    with client.open_session("m") as session:
        server.signal(signal.SIGTERM)
        wait_until_draining(client)
        with AdminClient(address) as admin:
            assert admin.undrain() == ("m",), "a signal is not taken back"
        assert works(session, "while it drains")
        assert server.is_alive
    assert server.end() == 0


def test_an_open_key_is_answered_while_the_server_drains(server: ServerProcess, client: Client, address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        request = allocator_pb2.OpenSessionRequest(pool_name="m", open_key="k")
        told = stub.OpenSession(request)
        server.signal(signal.SIGTERM)
        wait_until_draining(client)
        assert stub.OpenSession(request) == told
        stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id=told.session.session_id))
    assert server.end() == 0


def test_signals_during_exit_are_not_a_failure(server: ServerProcess) -> None:
    while server.is_alive:
        server.signal(signal.SIGTERM)
        time.sleep(0.001)  # many signals; the server exits nevertheless
    assert server.end() == 0
