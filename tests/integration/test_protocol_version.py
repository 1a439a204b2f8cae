"""Clients and servers of different protocol versions refuse each other, and nothing changes."""

# ruff: noqa: ARG002, N802 - services name the methods and their arguments

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvpool.client import Client, ServerError, connect
from kvpool.core.ids import PoolName
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, event_pb2, event_pb2_grpc, step_pb2
from kvpool.wire import pools as wire_pools
from kvpool.wire.protocol_version import PROTOCOL_VERSION
from support.server import pool_config, running_server

OTHER = PROTOCOL_VERSION + 1
PROMPT = list(range(9))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server() as address, connect(address) as client:
        client.create_pool(pool_config())
        yield address


@contextmanager
def refused(*texts: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error = caught.value
    assert isinstance(error, grpc.Call)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    for text in texts or (f"version {OTHER}", f"version {PROTOCOL_VERSION}"):
        assert text in str(error.details())


def test_a_server_opens_no_session_for_another_version(client: Client, stub: Any) -> None:
    before = client.get_pool("m").sessions
    with refused():
        stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="m", protocol_version=OTHER))
    assert client.get_pool("m").sessions == before


def test_a_server_applies_no_step_of_another_version(client: Client, stub: Any) -> None:
    with client.open_session("m") as session:
        before = client.get_pool("m")
        step = step_pb2.Step(session_id=session.session_id, sequence=1, protocol_version=OTHER)
        with refused():
            next(stub.Schedule(iter([step])))
        after = client.get_pool("m")
        assert (after.activity.steps, after.free_blocks) == (before.activity.steps, before.free_blocks)


def test_a_server_starts_no_watch_for_another_version(address: str) -> None:
    with grpc.insecure_channel(address) as channel, refused():
        next(
            event_pb2_grpc.EventServiceStub(channel).Watch(
                event_pb2.WatchRequest(pool_name="m", protocol_version=OTHER)
            )
        )


def test_a_server_serves_callers_that_state_no_version(stub: Any) -> None:
    opened = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="m"))
    assert opened.protocol_version == PROTOCOL_VERSION
    session_id = opened.session.session_id
    result = next(stub.Schedule(iter([step_pb2.Step(session_id=session_id, sequence=1)])))
    assert (result.sequence, result.protocol_version) == (1, PROTOCOL_VERSION)
    stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id=session_id))


def test_a_caller_of_a_pool_with_host_memory_states_its_version(client: Client, stub: Any) -> None:
    client.create_pool(replace(pool_config(), name=PoolName("tiers"), num_host_blocks=9))
    with refused("protocol_version: state it: the engines of a pool with host memory must make the copies"):
        stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="tiers"))
    assert client.get_pool("tiers").sessions == 0
    client.open_session("tiers").close()


@pytest.mark.parametrize(
    "versions", [(0, PROTOCOL_VERSION), (PROTOCOL_VERSION, 0), (PROTOCOL_VERSION, PROTOCOL_VERSION)]
)
def test_a_step_that_is_repeated_on_another_stream_may_state_the_version_or_not(
    stub: Any, versions: tuple[int, int]
) -> None:
    opened = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="m"))
    session_id = opened.session.session_id

    def step(sequence: int, version: int) -> step_pb2.Step:
        return step_pb2.Step(session_id=session_id, sequence=sequence, protocol_version=version)

    _, first = stub.Schedule(iter([step(1, PROTOCOL_VERSION), step(2, versions[0])]))
    again = next(stub.Schedule(iter([step(2, versions[1])])))
    assert (first.sequence, first.protocol_version) == (2, 0)  # the version is in the first result only
    assert (again.sequence, again.protocol_version) == (2, PROTOCOL_VERSION)
    stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id=session_id))


class OtherServer(allocator_pb2_grpc.AllocatorServiceServicer, event_pb2_grpc.EventServiceServicer):
    """A server of another release: how many sessions are open, and the versions that it states."""

    def __init__(self) -> None:
        self.opening_version = 0
        self.streaming_version = 0
        self.num_open = 0
        self.step_versions: list[tuple[int, int]] = []
        self.refused_sequence = 0

    def OpenSession(self, request: Any, context: Any) -> allocator_pb2.OpenSessionResponse:
        assert request.protocol_version == PROTOCOL_VERSION
        self.num_open += 1
        return allocator_pb2.OpenSessionResponse(
            session=allocator_pb2.Session(session_id="s", lease_seconds=60.0),
            config=wire_pools.config_to_proto(pool_config(), with_none_hash=True),
            protocol_version=self.opening_version,
        )

    def KeepAlive(self, request: Any, context: Any) -> allocator_pb2.KeepAliveResponse:
        return allocator_pb2.KeepAliveResponse(lease_seconds=60.0)

    def CloseSession(self, request: Any, context: Any) -> allocator_pb2.CloseSessionResponse:
        self.num_open -= 1
        return allocator_pb2.CloseSessionResponse()

    def Schedule(self, request_iterator: Any, context: Any) -> Iterator[step_pb2.StepResult]:
        version = self.streaming_version
        for step in request_iterator:
            self.step_versions.append((step.sequence, step.protocol_version))
            if step.sequence == self.refused_sequence:
                self.refused_sequence = 0
                context.abort(grpc.StatusCode.UNAVAILABLE, "")
            result = step_pb2.StepResult(sequence=step.sequence, protocol_version=version)
            if step.operations[0] == step_pb2.OPERATION_ADMIT:
                result.num_new_blocks.extend([0, 1])
                result.block_ids.append(1)
            yield result
            version = 0

    def Watch(self, request: Any, context: Any) -> Iterator[event_pb2.WatchResponse]:
        assert request.protocol_version == PROTOCOL_VERSION
        yield event_pb2.WatchResponse(kind=event_pb2.WATCH_RESPONSE_KIND_START, protocol_version=self.streaming_version)


@pytest.fixture
def other() -> Iterator[tuple[OtherServer, str]]:
    servicer = OtherServer()  # type: ignore[abstract]  # only the calls that a client makes
    server = grpc.server(futures.ThreadPoolExecutor(8))
    allocator_pb2_grpc.add_AllocatorServiceServicer_to_server(servicer, server)
    event_pb2_grpc.add_EventServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("version", [0, OTHER])
def test_a_client_refuses_a_server_of_another_version(other: tuple[OtherServer, str], version: int) -> None:
    servicer, address = other
    servicer.opening_version = servicer.streaming_version = version
    with connect(address) as client:
        with pytest.raises(ServerError, match=f"the client version {PROTOCOL_VERSION}"):
            client.open_session("m")
        assert servicer.num_open == 0
        for snapshot in (False, True):
            with pytest.raises(ServerError, match=f"the client version {PROTOCOL_VERSION}"):
                next(client.watch("m", snapshot=snapshot))


def test_a_client_applies_no_result_of_a_server_that_was_replaced(other: tuple[OtherServer, str]) -> None:
    """The server is replaced by one of another release while the session is open."""
    servicer, address = other
    servicer.opening_version = PROTOCOL_VERSION
    with connect(address) as client:
        session = client.open_session("m")
        request = session.request("r", PROMPT)
        with pytest.raises(ServerError, match="speaks no protocol version"):
            session.admit(request)
        assert (session.sequence, request.block_ids, request.num_computed_tokens) == (0, [[]], 0)
        session.close()


def test_a_client_states_its_version_with_each_step(other: tuple[OtherServer, str]) -> None:
    servicer, address = other
    servicer.opening_version = servicer.streaming_version = PROTOCOL_VERSION
    servicer.refused_sequence = 3  # its first attempt: the client opens another stream
    with connect(address) as client, client.open_session("m") as session:
        for _ in range(4):
            session.reset_prefix_cache()
    assert servicer.step_versions == [(sequence, PROTOCOL_VERSION) for sequence in (1, 2, 3, 3, 4)]
