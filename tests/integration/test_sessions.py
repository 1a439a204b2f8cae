"""Opening, closing and ending sessions: exactly once."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from kvpool.client import AbortedError, Client, KvpoolError, aio
from kvpool.client.admin import AdminClient
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, step_pb2
from kvpool.wire.errors import from_rpc_error
from support.server import pool_config, running_server

PROMPT = list(range(41))
STARTERS = {"CreatePool", "GetPool", "WaitUntilReady", "OpenSession"}
"""Calls without a session."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server(leases={"min_lease_seconds": 0.5, "max_lease_seconds": 60.0}) as address:
        yield address


def refusal(call: Callable[[], object]) -> KvpoolError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc_error(caught.value)


def calls_of_sessions(stub: allocator_pb2_grpc.AllocatorServiceStub) -> dict[str, Callable[[str], object]]:
    """Every call that names a session, found in the proto, with only the session and a number set."""
    service = allocator_pb2.DESCRIPTOR.services_by_name["AllocatorService"]
    calls: dict[str, Callable[[str], object]] = {}
    for method in service.methods:
        if method.name in STARTERS:
            continue
        numbered = {"sequence": 1} if "sequence" in method.input_type.fields_by_name else {}
        kind = getattr(step_pb2 if method.name == "Schedule" else allocator_pb2, method.input_type.name)

        def call(session_id: str, method: str = method.name, kind: Any = kind, numbered: Any = numbered) -> object:
            message = kind(session_id=session_id, **numbered)
            return next(stub.Schedule(iter([message]))) if method == "Schedule" else getattr(stub, method)(message)

        calls[method.name] = call
    assert {"KeepAlive", "CloseSession", "MarkExecuted", "Schedule", "Free"} <= set(calls)
    return calls


def opened(stub: allocator_pb2_grpc.AllocatorServiceStub, pool: str, **fields: Any) -> allocator_pb2.Session:
    return stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name=pool, **fields)).session


def allocate(
    stub: allocator_pb2_grpc.AllocatorServiceStub, session_id: str, sequence: int, request_id: str = "r"
) -> list[int]:
    update = allocator_pb2.RequestUpdate(request_id=request_id, num_appended_tokens=3)
    answer = stub.AllocateSlots(
        allocator_pb2.AllocateSlotsRequest(session_id=session_id, sequence=sequence, request=update, num_new_tokens=3)
    )
    return list(answer.new_blocks[0].block_ids)


def test_a_second_close_gets_the_same_answer_and_other_calls_fail(
    stub: allocator_pb2_grpc.AllocatorServiceStub, client: Client, pool: str
) -> None:
    session_id = opened(stub, pool).session_id
    allocate(stub, session_id, 1)
    for _ in range(2):
        answer = stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id=session_id))
        assert answer.num_freed_requests == 1
    before = client.get_pool(pool)
    for name, call in calls_of_sessions(stub).items():
        if name != "CloseSession":
            error = refusal(lambda call=call: call(session_id))  # type: ignore[misc]
            assert (type(error), error.reason) == (AbortedError, "SESSION_CLOSED"), name
    assert client.get_pool(pool) == before


def test_a_large_session_has_freed_everything_when_its_close_returns(
    stub: allocator_pb2_grpc.AllocatorServiceStub, client: Client
) -> None:
    client.create_pool(pool_config("large", 30_000))
    session, other = client.open_session("large"), client.open_session("large")
    for first in range(0, 3000, 1000):  # 3,000 requests of 8 blocks: three parts that evict, and six that free
        with session.step() as step:
            for i in range(first, first + 1000):
                step.admit(session.request(f"r{i}", range(32 * i, 32 * i + 32)))
    closing = allocator_pb2.CloseSessionRequest(session_id=session.session_id)
    assert [stub.CloseSession(closing).num_freed_requests for _ in range(2)] == [3000, 3000]
    info = client.get_pool("large")
    assert (info.free_blocks, info.cached_blocks, info.sessions) == (29_999, 0, 1)
    assert other.admit(other.request("r", range(32)))
    other.close()


def evict(address: str, pool: str) -> None:
    with AdminClient(address) as admin:
        (session,) = admin.sessions(pool)
        admin.evict_session(pool, session.session_number)


async def test_the_end_of_a_session_is_detected_between_steps_with_asyncio(address: str, pool: str) -> None:
    async with aio.connect(address) as client:
        session = await client.open_session(pool)
        await session.admit(session.request("r", PROMPT))
        await asyncio.to_thread(evict, address, pool)
        with pytest.raises(AbortedError):
            await session.mark_executed()
        assert session.lease_left_seconds == 0.0
