"""One server with real sockets: errors, leases, streams, two sessions in one pool, stopping."""

import queue
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvpool.client import (
    Client,
    ExhaustedError,
    NotFoundError,
    UnavailableError,
    aio,
    connect,
)
from kvpool.server.app import Server
from kvpool.server.config import ServerConfig
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, step_pb2
from kvpool.wire.errors import from_rpc_error
from kvpool.wire.pools import config_to_proto
from support import processes
from support.server import ServerProcess, pool_config, running_server
from support.waiting import wait_until

PROMPT = list(range(41))  # ten full blocks and one token


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server(max_message_bytes=128 * 1024) as address:
        yield address


def test_an_invalid_pool_is_refused_with_status_details_and_not_created(
    stub: allocator_pb2_grpc.AllocatorServiceStub,
) -> None:
    declared = config_to_proto(pool_config("bad"), with_none_hash=False)
    declared.num_blocks = 0
    with pytest.raises(grpc.RpcError) as caught:
        stub.CreatePool(allocator_pb2.CreatePoolRequest(config=declared))
    status = rpc_status.from_call(caught.value)
    assert status is not None
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.reason, info.domain, info.metadata["field"]) == ("INVALID_VALUE", "kvpool", "config.num_blocks")
    assert bad.field_violations[0].field == "config.num_blocks"
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetPool(allocator_pb2.GetPoolRequest(pool_name="bad"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_only_sessions_receive_the_none_hash(client: Client, pool: str) -> None:
    assert client.get_pool(pool).config.hash_scheme.none_hash == b""
    with client.open_session(pool) as one, client.open_session(pool) as other:
        assert len(one.config.hash_scheme.none_hash) == 32
        assert one.config == other.config


def test_unknown_pool_session_and_request(client: Client, stub: allocator_pb2_grpc.AllocatorServiceStub) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        client.open_session("nowhere")
    calls: tuple[Callable[[], object], ...] = (
        lambda: stub.KeepAlive(allocator_pb2.KeepAliveRequest(session_id="x")),
        lambda: stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id="x")),
        lambda: stub.Free(allocator_pb2.FreeRequest(session_id="x", sequence=1)),
        lambda: list(stub.Schedule(iter([step_pb2.Step(session_id="x", sequence=1)]))),
    )
    for unknown in calls:
        with pytest.raises(grpc.RpcError) as caught:
            unknown()
        assert from_rpc_error(caught.value).reason == "SESSION_NOT_FOUND"


@pytest.fixture
def session_id(stub: allocator_pb2_grpc.AllocatorServiceStub, pool: str) -> str:
    session = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name=pool)).session
    return session.session_id


def update(**fields: Any) -> allocator_pb2.RequestUpdate:
    return allocator_pb2.RequestUpdate(**{"request_id": "r", **fields})


HIT = allocator_pb2.ComputedBlocks(num_tokens=4, groups=[allocator_pb2.GroupBlocks()])
BAD_CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("GetComputedBlocks", "request.num_appended_tokens", {"request": update(num_appended_tokens=2**32 - 1)}),
    ("GetComputedBlocks", "request.request_id", {"request": update(request_id="")}),
    ("AllocateSlots", "num_new_tokens", {"request": update(num_appended_tokens=3)}),
    ("AllocateSlots", "computed.num_tokens", {"request": update(), "num_new_tokens": 1, "computed": HIT}),
    ("Free", "request.request_id", {"request": update()}),
    ("CacheBlocks", "request.request_id", {"request": update()}),
    ("EvictBlocks", "block_ids", {"block_ids": [0]}),
    ("ResetPrefixCache", "sequence", {"sequence": 3}),
    ("MarkExecuted", "executed_sequence", {"executed_sequence": 1}),
]


@pytest.mark.parametrize("case", BAD_CALLS, ids=lambda case: case[0])
def test_a_refused_call_names_its_own_field_and_changes_nothing(
    case: tuple[str, str, dict[str, Any]], session_id: str, pool: str, client: Client, stub: Any
) -> None:
    """Its field, not the column of the step that it becomes."""
    method, field, fields = case
    before = client.get_pool(pool)
    numbered = {} if method == "MarkExecuted" else {"sequence": 1}
    request = getattr(allocator_pb2, f"{method}Request")(**{"session_id": session_id, **numbered, **fields})
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(request)
    assert from_rpc_error(caught.value).field == field
    assert client.get_pool(pool) == before


def test_a_message_over_the_limit_is_refused_and_the_session_continues(client: Client, pool: str) -> None:
    with client.open_session(pool) as session:
        with pytest.raises(ExhaustedError):
            session.evict_blocks([1] * 200_000)
        assert session.admit(session.request("r", PROMPT)) is not None


def wait_for_free_blocks(client: Client, pool: str, count: int) -> None:
    wait_until(lambda: client.get_pool(pool).free_blocks == count, f"{count} blocks are free")


def test_a_new_stream_replaces_the_old_one_and_retries_get_the_same_answer(
    client: Client, pool: str, session_id: str, stub: allocator_pb2_grpc.AllocatorServiceStub
) -> None:
    step = step_pb2.Step(
        session_id=session_id,
        sequence=1,
        operations=[step_pb2.OPERATION_ADMIT],
        request_numbers=[1],
        declares=[True],
        num_appended_tokens=[3],
        request_ids=["r"],
    )
    outgoing: queue.SimpleQueue[step_pb2.Step | None] = queue.SimpleQueue()
    older = stub.Schedule(iter(outgoing.get, None))
    outgoing.put(step)
    first = next(older)
    newer = stub.Schedule(iter([step]))
    assert next(newer) == first
    with pytest.raises(grpc.RpcError) as caught:
        next(older)
    outgoing.put(None)
    assert from_rpc_error(caught.value).reason == "STREAM_SUPERSEDED"
    assert client.get_pool(pool).free_blocks == 98


def test_sigterm_ends_open_streams_with_a_retry_time_and_exits_0(tmp_path: Path) -> None:
    server = ServerProcess(f"unix:{tmp_path / 's'}", "127.0.0.1:0")
    with connect(server.addresses[1], deadline_seconds=5.0) as client:
        client.create_pool(pool_config())
        session = client.open_session("m")
        assert session.admit(session.request("r", PROMPT)) is not None
        server.stop_cleanly()
        with pytest.raises(UnavailableError):
            session.admit(session.request("s", PROMPT))


async def test_a_server_does_not_remove_the_socket_of_a_later_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    config = ServerConfig(addresses=(f"unix:{path}",))
    first, second = Server(config), Server(config)
    await first.start()
    path.unlink()
    await second.start()
    await first.stop()
    async with aio.connect(f"unix:{path}") as client:
        await client.create_pool(pool_config())
    await second.stop()


def test_a_second_server_on_a_live_socket_is_refused(address: str) -> None:
    with pytest.raises(AssertionError, match="another server listens"):
        ServerProcess(address)


STOPPED_SCHEDULER = """
import signal, sys
from kvpool.client import connect
client = connect(sys.argv[1])
session = client.open_session("m", lease_seconds=3.0)
session.admit(session.request("r", range(20)))
print("holds blocks", flush=True)
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_an_open_stream_of_a_stopped_process_does_not_hold_its_blocks(kind: str, tmp_path: Path) -> None:
    """The connections of the process stay open, but it does not respond."""
    server = ServerProcess(f"unix:{tmp_path / 's'}" if kind == "unix" else "127.0.0.1:0", dead_peer_seconds=2.0)
    with connect(server.addresses[0]) as client:
        client.create_pool(pool_config())
        command = [sys.executable, "-c", STOPPED_SCHEDULER, server.addresses[0]]
        scheduler = processes.start(command, stdout=processes.PIPE)
        try:
            assert scheduler.stdout
            assert scheduler.stdout.readline() == b"holds blocks\n"
            assert client.get_pool("m").free_blocks == 94
            scheduler.send_signal(signal.SIGSTOP)
            wait_for_free_blocks(client, "m", 99)
        finally:
            scheduler.kill()
            scheduler.communicate()
    server.stop_cleanly()
