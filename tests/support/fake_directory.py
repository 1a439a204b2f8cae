"""A server that only says where pools are, as a test decides."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_status import rpc_status

from kvpool.core.errors import KvpoolError, NotFoundError
from kvpool.v1 import directory_pb2, directory_pb2_grpc
from kvpool.wire.errors import to_status


class FakeDirectory(directory_pb2_grpc.DirectoryServiceServicer):
    """DirectoryService of a cluster.

    Attributes:
        address: Its address.
        shards: Addresses of each shard.
        pools: The shard of each pool. A pool that is placed goes to the shard with the name of the zone.
        asked: The calls, as name and pool.
        error: Raised by each call, if it is set.
        on_locate: Set by each Locate.
    """

    def __init__(self, path: Path, shards: dict[str, list[str]], pools: dict[str, str]) -> None:
        self.address = f"unix:{path}"
        self.shards = shards
        self.pools = pools
        self.asked: list[tuple[str, str]] = []
        self.error: KvpoolError | None = None
        self.on_locate = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(16))
        directory_pb2_grpc.add_DirectoryServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def Locate(  # noqa: N802 - the proto names it
        self, request: directory_pb2.LocateRequest, context: grpc.ServicerContext
    ) -> directory_pb2.LocateResponse:
        self._note("Locate", request.pool_name, context)
        shard = self.pools.get(request.pool_name, "")
        self.on_locate.set()
        if not shard:
            _abort(context, NotFoundError("POOL_NOT_FOUND", f"no shard has a pool {request.pool_name!r}"))
        return directory_pb2.LocateResponse(shard=shard, addresses=self.shards[shard])

    def Place(  # noqa: N802 - the proto names it
        self, request: directory_pb2.PlaceRequest, context: grpc.ServicerContext
    ) -> directory_pb2.PlaceResponse:
        self._note("Place", request.pool_name, context)
        shard = self.pools.setdefault(request.pool_name, request.zone)
        return directory_pb2.PlaceResponse(shard=shard, addresses=self.shards[shard])

    def ListShards(  # noqa: N802 - the proto names it
        self, _: directory_pb2.ListShardsRequest, context: grpc.ServicerContext
    ) -> directory_pb2.ListShardsResponse:
        self._note("ListShards", "", context)
        shards = [
            directory_pb2.Shard(name=name, term=1, primary_addresses=addresses)
            for name, addresses in self.shards.items()
        ]
        return directory_pb2.ListShardsResponse(shards=[*shards, directory_pb2.Shard(name="never had a primary")])

    def Watch(  # noqa: N802 - the proto names it
        self, _: directory_pb2.DirectoryServiceWatchRequest, context: grpc.ServicerContext
    ) -> Iterator[directory_pb2.DirectoryServiceWatchResponse]:
        _abort(context, NotFoundError("SHARD_NOT_FOUND", "this server belongs to no shard"))
        yield directory_pb2.DirectoryServiceWatchResponse()

    def stop(self) -> None:
        """Ends all connections."""
        self._server.stop(None).wait()

    def _note(self, method: str, pool: str, context: grpc.ServicerContext) -> None:
        self.asked.append((method, pool))
        if self.error:
            _abort(context, self.error)


def _abort(context: grpc.ServicerContext, error: KvpoolError) -> None:
    context.abort_with_status(rpc_status.to_status(to_status(error)))


@contextmanager
def fake_directories(folder: Path, shards: dict[str, list[str]], *names: str) -> Iterator[list[FakeDirectory]]:
    """Runs servers of one cluster, which share what they know."""
    pools: dict[str, str] = {}
    servers = [FakeDirectory(folder / name, shards, pools) for name in names]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
