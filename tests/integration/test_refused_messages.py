"""What remains of messages that are refused."""

import gc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from kvpool.server.app import Server
from kvpool.server.config import ServerConfig
from kvpool.v1 import (
    allocator_pb2,
    allocator_pb2_grpc,
    event_pb2,
    event_pb2_grpc,
    pool_pb2,
    step_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

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


async def _first_answer(call: Any, message: Message) -> None:
    await call.write(message)
    await call.read()
    await call.code()


def allocate(channel: grpc.aio.Channel) -> Awaitable[Any]:
    update = allocator_pb2.RequestUpdate(request_id=LONG)
    message = allocator_pb2.AllocateSlotsRequest(session_id="no session", sequence=1, request=update)
    return allocator_pb2_grpc.AllocatorServiceStub(channel).AllocateSlots(message)


def create(channel: grpc.aio.Channel) -> Awaitable[Any]:
    message = allocator_pb2.CreatePoolRequest(config=pool_pb2.PoolConfig(name=LONG))
    return allocator_pb2_grpc.AllocatorServiceStub(channel).CreatePool(message)


def keep_alive(channel: grpc.aio.Channel) -> Awaitable[Any]:
    message = allocator_pb2.KeepAliveRequest(session_id=LONG)
    return allocator_pb2_grpc.AllocatorServiceStub(channel).KeepAlive(message)


def too_large(channel: grpc.aio.Channel) -> Awaitable[Any]:
    message = allocator_pb2.KeepAliveRequest(session_id=LONG + LONG)
    return allocator_pb2_grpc.AllocatorServiceStub(channel).KeepAlive(message)


def schedule(channel: grpc.aio.Channel) -> Awaitable[Any]:
    return _first_answer(allocator_pb2_grpc.AllocatorServiceStub(channel).Schedule(), step_pb2.Step(session_id=LONG))


def watch(channel: grpc.aio.Channel) -> Awaitable[Any]:
    return event_pb2_grpc.EventServiceStub(channel).Watch(event_pb2.WatchRequest(pool_name=LONG)).read()


def join(channel: grpc.aio.Channel) -> Awaitable[Any]:
    message = worker_pb2.JoinRequest(register=worker_pb2.Register(pool_name=LONG))
    return _first_answer(worker_pb2_grpc.WorkerServiceStub(channel).Join(), message)


@pytest.mark.parametrize("refused", [allocate, create, keep_alive, too_large, schedule, watch, join])
async def test_refused_messages_are_free_before_garbage_is_collected(
    refused: Callable[[grpc.aio.Channel], Awaitable[Any]], tmp_path: Path, garbage: list[Any]
) -> None:
    server = Server(ServerConfig(addresses=(f"unix:{tmp_path / 's'}",)))
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refused(channel)
    assert caught.value.code() in REFUSED
    del caught
    await server.stop()  # all its calls have ended
    gc.collect()
    frames = [each for each in garbage if isinstance(each, FrameType)]
    held = [value for frame in frames for value in frame.f_locals.values()]
    assert not [value for value in held if isinstance(value, Message)]
    assert not [each for each in (*held, *garbage) if isinstance(each, str | bytes) and len(each) >= len(LONG)]
