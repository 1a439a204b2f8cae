"""A server that only says where pools are, as a test decides."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc

from kvpool.core.errors import KvpoolError, NotFoundError
from kvpool.v1 import directory_pb2, directory_pb2_grpc
from support.socket_server import SocketServer, abort


class SeedServer(SocketServer, directory_pb2_grpc.DirectoryServiceServicer):
    """DirectoryService of a cluster.

    Attributes:
        shards: Addresses of each shard.
        pools: The shard of each pool. A pool that is placed goes to the shard with the name of the zone.
        asked: The calls, as name and pool.
        error: Raised by each call, if it is set.
        on_locate: Set by each Locate.
    """

    def __init__(self, path: Path, shards: dict[str, list[str]], pools: dict[str, str]) -> None:
        self.shards = shards
        self.pools = pools
        self.asked: list[tuple[str, str]] = []
        self.error: KvpoolError | None = None
        self.on_locate = threading.Event()
        super().__init__(path, partial(directory_pb2_grpc.add_DirectoryServiceServicer_to_server, self))

    def Locate(  # noqa: N802 - the proto names it
        self, request: directory_pb2.LocateRequest, context: grpc.ServicerContext
    ) -> directory_pb2.LocateResponse:
        self._note("Locate", request.pool_name, context)
        shard = self.pools.get(request.pool_name, "")
        self.on_locate.set()
        if not shard:
            abort(context, NotFoundError("POOL_NOT_FOUND", f"no shard has a pool {request.pool_name!r}"))
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
        abort(context, NotFoundError("SHARD_NOT_FOUND", "this server belongs to no shard"))
        yield directory_pb2.DirectoryServiceWatchResponse()

    def _note(self, method: str, pool: str, context: grpc.ServicerContext) -> None:
        self.asked.append((method, pool))
        if self.error:
            abort(context, self.error)


@contextmanager
def seed_servers(folder: Path, shards: dict[str, list[str]], *names: str) -> Iterator[list[SeedServer]]:
    """Runs servers of one cluster, which share what they know."""
    pools: dict[str, str] = {}
    servers = [SeedServer(folder / name, shards, pools) for name in names]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
