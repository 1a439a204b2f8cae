"""Implements DirectoryService; proto/kvpool/v1/directory.proto documents each RPC."""

import asyncio
from collections.abc import Sequence
from typing import Final

from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.limits.streams import Context, StreamSlots, StreamWriter
from kvpool.server.services.components import Components
from kvpool.v1 import directory_pb2, directory_pb2_grpc

MAX_DIRECTORY_WATCHES: Final = 4096


class DirectoryService(directory_pb2_grpc.DirectoryServiceServicer):
    """The service of one server.

    Args:
        parts: The parts of the server.
        shard: Its shard; None without standbys: then it is the only server of a shard without a name.
        addresses: Addresses of the server.
    """

    def __init__(self, parts: Components, shard: ShardMember | None, addresses: Sequence[str]) -> None:
        self._parts = parts
        self._shard = shard
        self._addresses = addresses
        self._slots = StreamSlots(MAX_DIRECTORY_WATCHES, "TOO_MANY_STREAMS", "watches of shards")

    async def GetShard(self, _: directory_pb2.GetShardRequest, __: object) -> directory_pb2.GetShardResponse:
        return directory_pb2.GetShardResponse(shard=self._own())

    async def Watch(  # type: ignore[override]
        self, _: directory_pb2.DirectoryServiceWatchRequest, context: Context
    ) -> None:
        with (
            self._parts.calls.open() as call,
            self._slots.hold(),
            StreamWriter(context, self._parts.config.limits.stall_seconds) as writer,
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

    def _own(self) -> directory_pb2.Shard:
        if self._shard is None:
            member = directory_pb2.Member(member_id=self._parts.boot_id, addresses=self._addresses, is_primary=True)
            return directory_pb2.Shard(primary_addresses=self._addresses, members=[member])
        shard, record = directory_pb2.Shard(name=self._shard.name), self._shard.replica.entry.record
        if record:
            shard.term = record.term
            for each in sorted(record.in_sync, key=lambda each: each.member_id != record.primary):
                is_primary = each.member_id == record.primary
                shard.members.add(member_id=each.member_id, addresses=each.addresses, is_primary=is_primary)
            shard.primary_addresses.extend(shard.members[0].addresses)
        return shard
