"""What remains of messages that are refused."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from kvpool.server.app import Server
from kvpool.server.config import ServerConfig
from kvpool.v1 import allocator_pb2, event_pb2, pool_pb2, step_pb2, worker_pb2

LONG = "x" * 60_000
REFUSED = {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


@pytest.fixture
def garbage() -> Iterator[list[Any]]:
    """What a collection finds at the end; nothing is collected before."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


MESSAGES: dict[str, tuple[str, Message]] = {
    "allocate": (
        "AllocatorService/AllocateSlots",
        allocator_pb2.AllocateSlotsRequest(
            session_id="no session", sequence=1, request=allocator_pb2.RequestUpdate(request_id=LONG)
        ),
    ),
    "create": (
        "AllocatorService/CreatePool",
        allocator_pb2.CreatePoolRequest(config=pool_pb2.PoolConfig(name=LONG)),
    ),
    "keep alive": ("AllocatorService/KeepAlive", allocator_pb2.KeepAliveRequest(session_id=LONG)),
    "too large": ("AllocatorService/KeepAlive", allocator_pb2.KeepAliveRequest(session_id=LONG + LONG)),
    "schedule": ("AllocatorService/Schedule", step_pb2.Step(session_id=LONG)),
    "watch": ("EventService/Watch", event_pb2.WatchRequest(pool_name=LONG)),
    "join": ("WorkerService/Join", worker_pb2.JoinRequest(register=worker_pb2.Register(pool_name=LONG))),
}


@pytest.mark.parametrize("name", MESSAGES)
async def test_refused_messages_are_free_before_garbage_is_collected(
    name: str, tmp_path: Path, garbage: list[Any]
) -> None:
    method, message = MESSAGES[name]
    server = Server(ServerConfig(addresses=(f"unix:{tmp_path / 's'}",)))
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}") as channel:
        call: Any = channel.stream_stream(f"/kvpool.v1.{method}", type(message).SerializeToString)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(iter([message])).read()
    assert caught.value.code() in REFUSED
    del caught
    await server.stop()  # all its calls have ended
    gc.collect()
    frames = [each for each in garbage if isinstance(each, FrameType)]
    held = [value for frame in frames for value in frame.f_locals.values()]
    assert not [value for value in held if isinstance(value, Message)]
    assert not [each for each in (*held, *garbage) if isinstance(each, str | bytes) and len(each) >= len(LONG)]
