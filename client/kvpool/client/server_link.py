"""The connection of a transport to one server."""

from collections.abc import Callable
from typing import Any, Protocol

from kvpool.v1 import admin_pb2_grpc, allocator_pb2_grpc, directory_pb2_grpc, event_pb2_grpc
from kvpool.v1.allocator_pb2 import StepListener


class Cancellable(Protocol):
    """A call that another thread may cancel."""

    def cancel(self) -> None:
        """Ends the call. Repeats do nothing."""


class ServerLink:
    """A connection to one server. The methods of its stubs block, or return awaitables, as its channel does.

    Attributes:
        address: Address of the server.
        allocator: The stub of AllocatorService.
        events: The stub of EventService.
        directory: The stub of DirectoryService.
        admin: The stub of AdminService, on a blocking channel.
        schedule: Calls Schedule with encoded steps and results.
        read_token: Reads the token; empty for none.
        step_listener: Where the server takes steps as frames; None: ask it.
        num_failed_dials: Number of times since the last link that none could be made.
        grpc_until_seconds: Time of the monotonic clock until which steps go over gRPC, as the listener was not reached.
        step_calls: The open calls of steps on links.
    """

    def __init__(self, address: str, channel: Any, read_token: Callable[[], str] = str) -> None:  # noqa: ANN401 - a blocking channel or one of asyncio
        self.address = address
        self.allocator: Any = allocator_pb2_grpc.AllocatorServiceStub(channel)
        self.events: Any = event_pb2_grpc.EventServiceStub(channel)
        self.directory: Any = directory_pb2_grpc.DirectoryServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.schedule: Any = channel.stream_stream("/kvpool.v1.AllocatorService/Schedule")
        self.read_token = read_token
        self.step_listener: StepListener | None = None
        self.num_failed_dials = 0
        self.grpc_until_seconds = 0.0
        self.step_calls: set[Cancellable] = set()
        self._channel = channel

    async def close(self) -> None:
        """Ends the connection and cancels its calls."""
        for call in list(self.step_calls):
            call.cancel()
        closing = self._channel.close()
        if closing is not None:  # a channel of asyncio
            await closing
