"""Implements DirectoryService; proto/kvpool/v1/directory.proto documents each RPC."""

import asyncio
from collections.abc import Sequence
from typing import Final

from kvpool.core.errors import InvalidArgumentError, NotFoundError
from kvpool.core.ids import PoolName
from kvpool.core.specs.pool_config import check_pool_name
from kvpool.server.cluster.directory import NAME, ShardName
from kvpool.server.cluster.directory_cache import DirectoryCache
from kvpool.server.cluster.pool_claims import PoolClaims
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.limits.streams import Context, StreamSlots, StreamWriter
from kvpool.server.services.components import Components
from kvpool.v1 import directory_pb2, directory_pb2_grpc

MAX_DIRECTORY_WATCHES: Final = 4096


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

    async def Locate(self, request: directory_pb2.LocateRequest, _: object) -> directory_pb2.LocateResponse:
        # A server without a cluster has all pools that there are.
        shard = self._of(self._view.shard_of(request.pool_name)) if self._shard else self._own()
        return directory_pb2.LocateResponse(
            shard=shard.name,
            term=shard.term,
            primary_addresses=shard.primary_addresses,
            addresses=_addresses(shard),
            is_own=self._is_own(shard.name),
        )

    async def Place(self, request: directory_pb2.PlaceRequest, _: object) -> directory_pb2.PlaceResponse:
        check_pool_name("pool_name", request.pool_name)
        if request.zone and not NAME.fullmatch(request.zone):
            raise InvalidArgumentError("zone", "needs 1 to 64 letters, digits, '.', '_' and '-'")
        if not self._claims:
            return directory_pb2.PlaceResponse(is_own=self._is_own(""))
        with self._parts.calls.open() as call, call.wait():
            name = await self._claims.place(PoolName(request.pool_name), request.zone)
        return directory_pb2.PlaceResponse(shard=name, addresses=_addresses(self._of(name)), is_own=self._is_own(name))

    async def Watch(  # type: ignore[override]
        self, request: directory_pb2.DirectoryServiceWatchRequest, context: Context
    ) -> None:
        own = self._own()
        if request.shard not in ("", own.name):
            message = f"this server does not belong to shard {request.shard!r}"
            raise NotFoundError("SHARD_NOT_FOUND", message, field="shard")
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

    async def ListShards(self, _: directory_pb2.ListShardsRequest, __: object) -> directory_pb2.ListShardsResponse:
        if self._shard is None:
            return directory_pb2.ListShardsResponse(shards=[self._own()])
        self._view.check_known()
        return directory_pb2.ListShardsResponse(shards=map(self._of, sorted(self._view.shards)))

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
