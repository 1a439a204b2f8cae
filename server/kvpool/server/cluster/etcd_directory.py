"""The directory of shards in etcd: one key per shard, `/kvpool/CLUSTER/shards/NAME`.

A record's revision is the `mod_revision` of its key, so it increases over a deletion, too.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence

from kvpool.etcd import kv_pb2, rpc_pb2
from kvpool.server.cluster.directory import DamagedRecordError, DirectoryError, Entry, ShardName, ShardRecord, Swap
from kvpool.server.cluster.etcd_client import PAUSE_SECONDS, EtcdClient
from kvpool.server.cluster.etcd_config import EtcdConfig
from kvpool.server.cluster.etcd_errors import EtcdUnavailableError
from kvpool.server.cluster.record_codec import decode_record, encode_record


class EtcdDirectory:
    """See `Directory`. Make it in the event loop that uses it.

    It remembers which etcd cluster it talks to, and the highest revision. If etcd is another one or has an older
    revision, this and each later call raises DirectoryWentBackError.

    Args:
        config: How to reach etcd.
        call_timeout_seconds: Time limit of a call.
        attempt_timeout_seconds: Time limit of an attempt at one member of etcd.

    Raises:
        ValueError: A TLS file cannot be read; the message names it.
    """

    def __init__(
        self, config: EtcdConfig, *, call_timeout_seconds: float = 3.0, attempt_timeout_seconds: float = 1.0
    ) -> None:
        self._client = EtcdClient(config, call_timeout_seconds, attempt_timeout_seconds)
        self._prefix = config.prefix

    async def get(self, shard: ShardName) -> Entry:
        """See `Directory`."""
        return _entry_of((await self._client.read(self._range(shard))).kvs)

    async def compare_and_swap(self, shard: ShardName, revision: int, record: ShardRecord) -> Swap:
        """See `Directory`. A swap that finds its own `change_id` has won: an earlier attempt was applied.

        Raises:
            ValueError: The record is invalid.
        """
        key = self._key(shard)
        request = rpc_pb2.TxnRequest(
            compare=[
                rpc_pb2.Compare(
                    result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.MOD, key=key, mod_revision=revision
                )
            ],
            success=[rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=encode_record(record)))],
            failure=[rpc_pb2.RequestOp(request_range=self._range(shard))],
        )
        response = await self._client.write(request)
        if response.succeeded:
            return Swap(won=True, entry=Entry(response.header.revision, record))
        found = _entry_of(response.responses[0].response_range.kvs)
        return Swap(won=found.record is not None and found.record.change_id == record.change_id, entry=found)

    async def watch(self, shard: ShardName) -> AsyncGenerator[Entry, None]:
        """See `Directory`.

        The entry after a deletion has the deletion's revision and no record. A swap needs revision 0 then.
        Each stream begins with a read, so a lost connection, a compaction and an expired token need no rules of their
        own. Changes between the end of a stream and the read are left out, except for the last one.
        """
        last: Entry | None = None
        while not self._client.is_closed:
            try:
                response = await self._client.read(self._range(shard))
                now = _entry_of(response.kvs)
                if last is not None and now.record is None:
                    now = last if last.record is None else Entry(response.header.revision, None)
                if now != last:
                    last = now
                    yield now
                with contextlib.suppress(EtcdUnavailableError):  # the read asks all members
                    changes = self._client.changes(self._key(shard), response.header.revision + 1)
                    async with contextlib.aclosing(changes):
                        async for event in changes:
                            last = _entry_after(event)
                            yield last
            except DirectoryError:
                if not self._client.is_closed:
                    raise
            await asyncio.sleep(PAUSE_SECONDS)

    async def list_shards(self) -> Mapping[ShardName, Entry]:
        """See `Directory`."""
        end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        response = await self._client.read(rpc_pb2.RangeRequest(key=self._prefix, range_end=end))
        return {
            ShardName(pair.key.removeprefix(self._prefix).decode("utf-8", "replace")): _entry_of([pair])
            for pair in response.kvs
        }

    async def close(self) -> None:
        """See `Directory`. Calls in progress raise DirectoryError; watches end."""
        await self._client.close()

    def _key(self, shard: ShardName) -> bytes:
        return self._prefix + shard.encode()

    def _range(self, shard: ShardName) -> rpc_pb2.RangeRequest:
        return rpc_pb2.RangeRequest(key=self._key(shard))


def _entry_of(pairs: Sequence[kv_pb2.KeyValue]) -> Entry:
    if not pairs:
        return Entry(0, None)
    (pair,) = pairs
    try:
        return Entry(pair.mod_revision, decode_record(pair.value))
    except DamagedRecordError as error:
        raise DamagedRecordError(f"{pair.key.decode('utf-8', 'replace')} in etcd: {error}") from error


def _entry_after(event: kv_pb2.Event) -> Entry:
    if event.type == kv_pb2.Event.DELETE:
        return Entry(event.kv.mod_revision, None)
    return _entry_of([event.kv])
