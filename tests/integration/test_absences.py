"""Processes that are stopped, killed and restarted: expiry of leases, and errors on the other side."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.client import Client, NotFoundError, connect
from kvpool.client.transports.grpc import GrpcTransport
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc
from kvpool.wire.errors import from_rpc_error
from support import processes
from support.server import CommandLineServer, ServerProcess, pool_config, server_process
from support.waiting import DEADLINE_SECONDS, wait_until

PROMPT = list(range(41))
LEASE_SECONDS = 3.0


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with server_process() as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with connect(server.addresses[0]) as client:
        client.create_pool(pool_config())
        yield client


def wait_until_sessions_are(client: Client, count: int) -> None:
    wait_until(lambda: client.get_pool("m").sessions == count, f"{count} sessions are open")


@pytest.mark.slow  # a lease passes
def test_a_stopped_server_expires_no_lease(server: ServerProcess, client: Client) -> None:
    session = client.open_session("m", lease_seconds=LEASE_SECONDS)
    request = session.request("r", PROMPT)
    session.admit(request)
    with grpc.insecure_channel(server.addresses[0]) as channel:
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        opened = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="m", lease_seconds=LEASE_SECONDS))
        keep_alive = allocator_pb2.KeepAliveRequest(session_id=opened.session.session_id)
        server.pause()
        time.sleep(LEASE_SECONDS + 1.0)  # the lease passes while the server is stopped
        assert session.lease_left_seconds == 0.0
        server.resume()
        stub.KeepAlive(keep_alive, wait_for_ready=True)
        request.append([1])
        assert session.allocate_slots(request, 1) is not None
        assert session.lease_left_seconds > 0.0
        assert client.get_pool("m").activity.leases_expired == 0
        wait_until_sessions_are(client, 1)  # the stopped one
        with pytest.raises(grpc.RpcError) as caught:
            stub.KeepAlive(keep_alive)
    assert from_rpc_error(caught.value).reason == "LEASE_EXPIRED"
    session.close()


SCHEDULER = """
import sys
from kvpool.client import AbortedError, connect
client = connect(sys.argv[1])
session = client.open_session("m", lease_seconds=2.0)
request = session.request("r", range(20))
session.admit(request)
print("holds blocks", flush=True)
sys.stdin.readline()
for attempt in range(2):
    request.append([1])
    try:
        session.allocate_slots(request, 1)
    except AbortedError as error:
        print(error.reason, session.lease_left_seconds, flush=True)
client.open_session("m").close()
client.close()
print("went on", flush=True)
"""


def test_a_stopped_scheduler_learns_that_its_lease_expired(server: ServerProcess, client: Client) -> None:
    command = [sys.executable, "-c", SCHEDULER, server.addresses[0]]
    scheduler = processes.start(command, stdin=processes.PIPE, stdout=processes.PIPE, text=True)
    assert scheduler.stdout
    try:
        assert scheduler.stdout.readline() == "holds blocks\n"
        scheduler.send_signal(signal.SIGSTOP)
        wait_until_sessions_are(client, 0)
        scheduler.send_signal(signal.SIGCONT)
        told, _ = scheduler.communicate("go on\n", timeout=DEADLINE_SECONDS)
    finally:
        scheduler.kill()
        scheduler.communicate()
    assert told.splitlines() == ["LEASE_EXPIRED 0.0", "LEASE_EXPIRED 0.0", "went on"]
    assert client.get_pool("m").activity.sessions_opened == 2


def test_an_idle_client_whose_link_was_lost_renews_its_lease_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals: list[bool] = []
    call_at = GrpcTransport.call_at

    async def counted(transport: GrpcTransport, method: str, *args: Any) -> tuple[float, Any]:
        answered = await call_at(transport, method, *args)
        renewals.append(method == "KeepAlive")
        return answered

    options = ("--journal", tmp_path / "journal")
    with CommandLineServer(f"unix:{tmp_path / 's'}", options=options) as server, connect(server.addresses[0]) as client:
        client.create_pool(pool_config())
        session = client.open_session("m", lease_seconds=600)
        session.admit(session.request("r", PROMPT))
        monkeypatch.setattr(GrpcTransport, "call_at", counted)
        server.restart()
        wait_until(lambda: any(renewals), "a renewal")
        for _ in range(300):
            client.get_pool("m")
        assert sum(renewals) < 30
        assert session.admit(session.request("s", PROMPT))


def test_sessions_after_a_killed_server_without_a_journal(tmp_path: Path) -> None:
    """Without a journal the next server knows no session: a clear error, then a new session on the same connection."""
    address = f"unix:{tmp_path / 's'}"
    with ServerProcess(address) as server, connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(pool_config())
        session = client.open_session("m")
        request = session.request("r", PROMPT)
        session.admit(request)
        server.kill()
        later = threading.Timer(0.5, server.restart)
        later.start()
        with pytest.raises(NotFoundError) as caught:
            session.free(request)
        assert caught.value.reason == "SESSION_NOT_FOUND"
        session.settle()  # nothing is unsettled
        with pytest.raises(NotFoundError):
            session.mark_executed()
        assert session.lease_left_seconds == 0.0
        client.create_pool(pool_config())
        with client.open_session("m") as again:
            assert again.admit(again.request("r", PROMPT)) is not None
        later.join()


INSTANTS = ("session.opened:kill:1", "step.decoded:kill:2", "step.answered:kill:2", "session.closed:kill:1")


@pytest.mark.parametrize(
    "instant", ["step.applied:kill:2", *(pytest.param(each, marks=pytest.mark.slow) for each in INSTANTS)]
)
def test_a_killed_server_with_a_journal_is_transparent(instant: str, tmp_path: Path) -> None:
    """One client and one session: no call fails, and no change is made twice."""
    address, options = f"unix:{tmp_path / 's'}", ("--journal", tmp_path / "journal")
    first = CommandLineServer(address, options=options, faults=instant)
    restarted: list[CommandLineServer] = []

    def restart() -> None:
        first.end()
        restarted.append(CommandLineServer(address, options=options))

    restarting = threading.Thread(target=restart)
    restarting.start()
    try:
        with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
            client.create_pool(pool_config())
            session = client.open_session("m")
            request = session.request("r", PROMPT)
            session.admit(request)
            request.append([1, 2, 3, 4])
            session.allocate_slots(request, 4)
            assert request.block_ids == [list(range(1, 13))]
            session.free(request)
            session.close()
            info = client.get_pool("m")
        assert first.end() == -signal.SIGKILL
    finally:
        first.kill()
        restarting.join()
        restarted[0].stop_cleanly()
    activity = info.activity
    assert (activity.steps, activity.sessions_opened, activity.sessions_closed, activity.allocations) == (3, 1, 1, 2)
    assert (info.free_blocks, info.sessions) == (99, 0)


def test_the_first_call_waits_for_a_server_that_starts(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    started: list[ServerProcess] = []
    later = threading.Timer(0.5, lambda: started.append(ServerProcess(address)))
    later.start()
    with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        assert client.create_pool(pool_config()).free_blocks == 99
    later.join()
    started[0].stop_cleanly()
