"""Implements DirectoryService; proto/kvpool/v1/directory.proto documents each RPC."""

import asyncio
from collections.abc import Sequence
from typing import Final

import grpc

from kvpool.core.errors import NotFoundError
from kvpool.server.cluster.shard import Shard
from kvpool.server.limits.streams import StreamSlots, StreamWriter
from kvpool.server.rpc import errors_sent
from kvpool.server.services.components import Components
from kvpool.v1 import directory_pb2, directory_pb2_grpc

MAX_DIRECTORY_WATCHES: Final = 4096

_LocateContext = grpc.aio.ServicerContext[directory_pb2.LocateRequest, directory_pb2.LocateResponse]
_WatchContext = grpc.aio.ServicerContext[
    directory_pb2.DirectoryServiceWatchRequest, directory_pb2.DirectoryServiceWatchResponse
]
_ListContext = grpc.aio.ServicerContext[directory_pb2.ListShardsRequest, directory_pb2.ListShardsResponse]


class DirectoryService(directory_pb2_grpc.DirectoryServiceServicer):
    """The service of one server, which knows its own shard.

    Args:
        parts: The parts of the server.
        shard: Its shard; None without a cluster: then it is the only server of a shard without a name.
        addresses: Addresses of the server.
    """

    def __init__(self, parts: Components, shard: Shard | None, addresses: Sequence[str]) -> None:
        self._parts = parts
        self._shard = shard
        self._addresses = addresses
        self._slots = StreamSlots(MAX_DIRECTORY_WATCHES, "TOO_MANY_STREAMS", "watches of shards")
        self._stall_seconds = parts.config.limits.stall_seconds

    async def Locate(
        self, request: directory_pb2.LocateRequest, context: _LocateContext
    ) -> directory_pb2.LocateResponse:
        response = directory_pb2.LocateResponse()
        async with errors_sent(context, "Locate"):
            self._parts.pools.check_exists(request.pool_name)
            shard = self._own()
            response.shard, response.term = shard.name, shard.term
            response.primary_addresses.extend(shard.primary_addresses)
            response.addresses.extend(address for member in shard.members for address in member.addresses)
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
            response.shards.append(self._own())
        return response

    def _own(self) -> directory_pb2.Shard:
        if self._shard is None:
            member = directory_pb2.Member(member_id=self._parts.boot_id, addresses=self._addresses, is_primary=True)
            return directory_pb2.Shard(primary_addresses=self._addresses, members=[member])
        record = self._shard.replica.entry.record
        if record is None:
            return directory_pb2.Shard(name=self._shard.name)
        members = [
            directory_pb2.Member(
                member_id=member.member_id,
                addresses=member.addresses,
                is_primary=member.member_id == record.primary,
            )
            for member in sorted(record.in_sync, key=lambda member: member.member_id != record.primary)
        ]
        return directory_pb2.Shard(
            name=self._shard.name, term=record.term, primary_addresses=members[0].addresses, members=members
        )
