"""The connection of a transport to one server."""

from typing import Any

from kvpool.v1 import admin_pb2_grpc, allocator_pb2_grpc, directory_pb2_grpc, event_pb2_grpc


class ServerLink:
    """A connection to one server. The methods of its stubs block, or return awaitables, as its channel does.

    Attributes:
        address: Address of the server.
        allocator: The stub of AllocatorService.
        events: The stub of EventService.
        directory: The stub of DirectoryService.
        admin: The stub of AdminService, on a blocking channel.
    """

    def __init__(self, address: str, channel: Any) -> None:  # noqa: ANN401 - a blocking channel or one of asyncio
        self.address = address
        self.allocator: Any = allocator_pb2_grpc.AllocatorServiceStub(channel)
        self.events: Any = event_pb2_grpc.EventServiceStub(channel)
        self.directory: Any = directory_pb2_grpc.DirectoryServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self._channel = channel

    async def close(self) -> None:
        """Ends the connection and cancels its calls."""
        closing = self._channel.close()
        if closing is not None:  # a channel of asyncio
            await closing
