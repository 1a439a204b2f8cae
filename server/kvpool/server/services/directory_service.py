"""Implements DirectoryService; proto/kvpool/v1/directory.proto documents each RPC."""

import asyncio
from collections.abc import Sequence
from typing import Final

import grpc

from kvpool.core.errors import InvalidArgumentError, NotFoundError
from kvpool.core.ids import PoolName
from kvpool.core.specs.pool_config import check_pool_name
from kvpool.server.cluster.directory import NAME, ShardName
from kvpool.server.cluster.directory_cache import DirectoryCache
from kvpool.server.cluster.pool_claims import PoolClaims
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.limits.streams import StreamSlots, StreamWriter
from kvpool.server.rpc import errors_sent
from kvpool.server.services.components import Components
from kvpool.v1 import directory_pb2, directory_pb2_grpc

MAX_DIRECTORY_WATCHES: Final = 4096

_LocateContext = grpc.aio.ServicerContext[directory_pb2.LocateRequest, directory_pb2.LocateResponse]
_PlaceContext = grpc.aio.ServicerContext[directory_pb2.PlaceRequest, directory_pb2.PlaceResponse]
_WatchContext = grpc.aio.ServicerContext[
    directory_pb2.DirectoryServiceWatchRequest, directory_pb2.DirectoryServiceWatchResponse
]
_ListContext = grpc.aio.ServicerContext[directory_pb2.ListShardsRequest, directory_pb2.ListShardsResponse]


class DirectoryService(directory_pb2_grpc.DirectoryServiceServicer):
    """The service of one server.

    Args:
        parts: The parts of the server.
        shard: Its shard; None without a cluster: then it is the only server of a shard without a name.
        view: What the server knows of its cluster.
        claims: The pools of its shard; None without a cluster.
        addresses: Addresses of the server.
    """

    def __init__(
        self,
        parts: Components,
        shard: ShardMember | None,
        view: DirectoryCache,
        claims: PoolClaims | None,
        addresses: Sequence[str],
    ) -> None:
        self._parts = parts
        self._shard = shard
        self._view = view
        self._claims = claims
        self._addresses = addresses
        self._slots = StreamSlots(MAX_DIRECTORY_WATCHES, "TOO_MANY_STREAMS", "watches of shards")
        self._stall_seconds = parts.config.limits.stall_seconds

    async def Locate(
        self, request: directory_pb2.LocateRequest, context: _LocateContext
    ) -> directory_pb2.LocateResponse:
        response = directory_pb2.LocateResponse()
        async with errors_sent(context, "Locate"):
            # A server without a cluster has all pools that there are.
            shard = self._of(self._view.shard_of(request.pool_name)) if self._shard else self._own()
            response.shard, response.term = shard.name, shard.term
            response.primary_addresses.extend(shard.primary_addresses)
            response.addresses.extend(_addresses(shard))
            response.is_own = self._is_own(shard.name)
        return response

    async def Place(self, request: directory_pb2.PlaceRequest, context: _PlaceContext) -> directory_pb2.PlaceResponse:
        response = directory_pb2.PlaceResponse()
        async with errors_sent(context, "Place"):
            check_pool_name("pool_name", request.pool_name)
            if request.zone and not NAME.fullmatch(request.zone):
                raise InvalidArgumentError("zone", "needs 1 to 64 letters, digits, '.', '_' and '-'")
            if self._claims:
                with self._parts.calls.open() as call, call.wait():
                    name = await self._claims.place(PoolName(request.pool_name), request.zone)
                response.shard = name
                response.addresses.extend(_addresses(self._of(name)))
            response.is_own = self._is_own(response.shard)
        return response

    async def Watch(  # type: ignore[override]
        self, request: directory_pb2.DirectoryServiceWatchRequest, context: _WatchContext
    ) -> None:
        async with errors_sent(context, "Watch"):
            own = self._own()
            if request.shard not in ("", own.name):
                raise NotFoundError(
                    "SHARD_NOT_FOUND", f"this server does not belong to shard {request.shard!r}", field="shard"
                )
            with (
                self._parts.calls.open() as call,
                self._slots.hold(),
                StreamWriter(context, self._stall_seconds) as writer,
            ):
                sent = None
                while True:
                    changed = self._shard.changed if self._shard else asyncio.Event()
                    shard = self._own()
                    if shard != sent:
                        await writer.write(directory_pb2.DirectoryServiceWatchResponse(shard=shard))
                        sent = shard
                    with call.wait():
                        await changed.wait()

    async def ListShards(
        self, _: directory_pb2.ListShardsRequest, context: _ListContext
    ) -> directory_pb2.ListShardsResponse:
        response = directory_pb2.ListShardsResponse()
        async with errors_sent(context, "ListShards"):
            if self._shard is None:
                response.shards.append(self._own())
            else:
                self._view.check_known()
                response.shards.extend(self._of(name) for name in sorted(self._view.shards))
        return response

    def _own(self) -> directory_pb2.Shard:
        if self._shard is None:
            member = directory_pb2.Member(member_id=self._parts.boot_id, addresses=self._addresses, is_primary=True)
            return directory_pb2.Shard(primary_addresses=self._addresses, members=[member])
        return self._of(self._shard.shard)

    def _is_own(self, name: str) -> bool:
        return self._shard is None or name == self._shard.shard

    def _of(self, name: ShardName) -> directory_pb2.Shard:
        is_own = self._shard and self._is_own(name)
        record = self._shard.replica.entry.record if self._shard and is_own else self._view.shards.get(name)
        shard = directory_pb2.Shard(name=name, num_pools=self._view.num_pools[name])
        if record:
            shard.term = record.term
            for member in sorted(record.in_sync, key=lambda member: member.member_id != record.primary):
                shard.members.add(
                    member_id=member.member_id,
                    addresses=member.addresses,
                    is_primary=member.member_id == record.primary,
                    zone=member.zone,
                )
            shard.primary_addresses.extend(shard.members[0].addresses)
        return shard


def _addresses(shard: directory_pb2.Shard) -> list[str]:
    return [address for member in shard.members for address in member.addresses]
