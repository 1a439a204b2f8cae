"""A request declared by a unary call without a number."""

from collections.abc import Iterator

import pytest

from kvpool.client import Client
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc
from support.server import running_server


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server() as address:
        yield address


def test_an_unnumbered_request_is_freed_by_its_id(
    client: Client, pool: str, stub: allocator_pb2_grpc.AllocatorServiceStub
) -> None:
    opened = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name=pool, lease_seconds=60)).session
    update = allocator_pb2.RequestUpdate(request_id="r", num_appended_tokens=8, block_hashes=b"x" * 64)
    stub.AllocateSlots(
        allocator_pb2.AllocateSlotsRequest(session_id=opened.session_id, sequence=1, request=update, num_new_tokens=8)
    )
    free_blocks = client.get_pool(pool).free_blocks
    request = allocator_pb2.RequestUpdate(request_id="r")
    stub.Free(allocator_pb2.FreeRequest(session_id=opened.session_id, sequence=2, request=request))
    assert client.get_pool(pool).free_blocks == free_blocks + 2
    stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id=opened.session_id))
