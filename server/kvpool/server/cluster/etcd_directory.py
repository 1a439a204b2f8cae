"""The directory of a cluster in etcd: the keys `/kvpool/CLUSTER/shards/NAME` and `/kvpool/CLUSTER/pools/NAME`.

The value of a shard is its record, that of a pool is the name of its shard. A record's revision is the `mod_revision`
of its key, so it increases over a deletion, too.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import PoolName
from kvpool.core.specs.pool_config import check_pool_name
from kvpool.etcd import kv_pb2, rpc_pb2
from kvpool.server.cluster.directory import (
    NAME,
    Changes,
    DamagedRecordError,
    DirectoryError,
    ShardName,
    ShardRecord,
    SwapResult,
    VersionedRecord,
)
from kvpool.server.cluster.etcd_client import EtcdClient
from kvpool.server.cluster.etcd_config import EtcdConfig
from kvpool.server.cluster.etcd_errors import EtcdUnavailableError
from kvpool.server.cluster.record_codec import decode_record, encode_record
from kvpool.wire.backoff import Backoff

_PAGE_KEYS: Final = 1000
_MAX_SHOWN_BYTES: Final = 256

_log = logging.getLogger("kvpool.server.cluster")


@dataclass(frozen=True, slots=True)
class _Batch:
    """What keys hold, as if it had just been written, or changes of them.

    Attributes:
        revision: Revision up to which it is complete.
        events: The changes.
        is_whole: Whether keys that are missing here do not exist.
    """

    revision: int
    events: Sequence[kv_pb2.Event]
    is_whole: bool


class EtcdDirectory:
    """See `Directory`. Make it in the event loop that uses it.

    It remembers which etcd cluster it talks to, and the highest revision. If etcd is another one or has an older
    revision, this and each later call raises DirectoryRegressedError.

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
        self._all = _keys_with(config.prefix)
        self._shards, self._pools = config.prefix + b"shards/", config.prefix + b"pools/"

    async def get(self, shard: ShardName) -> VersionedRecord:
        """See `Directory`."""
        return _entry_of((await self._client.read(self._range(shard))).kvs)

    async def compare_and_swap(self, shard: ShardName, revision: int, record: ShardRecord) -> SwapResult:
        """See `Directory`. A swap that finds its own `change_id` has won: an earlier attempt was applied.

        Raises:
            ValueError: The record is invalid.
        """
        key = self._key(shard)
        request = rpc_pb2.TxnRequest(
            compare=[_has_revision(key, revision)],
            success=[rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=encode_record(record)))],
            failure=[rpc_pb2.RequestOp(request_range=self._range(shard))],
        )
        response = await self._client.write(request)
        if response.succeeded:
            return SwapResult(won=True, entry=VersionedRecord(response.header.revision, record))
        found = _entry_of(response.responses[0].response_range.kvs)
        return SwapResult(won=found.record is not None and found.record.change_id == record.change_id, entry=found)

    async def delete(self, shard: ShardName, revision: int) -> bool:
        """See `Directory`. A deletion that finds no record counts as done: an earlier attempt may have been applied."""
        key = self._key(shard)
        request = rpc_pb2.TxnRequest(
            compare=[_has_revision(key, revision)],
            success=[rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))],
            failure=[rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key, keys_only=True))],
        )
        response = await self._client.write(request)
        return response.succeeded or not response.responses[0].response_range.kvs

    async def watch(self, shard: ShardName) -> AsyncGenerator[VersionedRecord, None]:
        """See `Directory`.

        An entry without a record has the revision of the deletion, or of the read. A swap needs revision 0 then.
        Each stream begins with a read, so a lost connection, a compaction and an expired token need no rules of their
        own. Changes between the end of a stream and the read are left out, except for the last one.
        """
        last: VersionedRecord | None = None
        async with contextlib.aclosing(self._follow(self._range(shard))) as batches:
            async for batch in batches:
                if batch.is_whole:
                    now = _entry_after(batch.events[0]) if batch.events else VersionedRecord(batch.revision, None)
                    is_still_none = last is not None and last.record is None and now.record is None
                    if now != last and not is_still_none:
                        last = now
                        yield now
                    continue
                for event in batch.events:
                    last = _entry_after(event)
                    yield last

    async def watch_all(self) -> AsyncGenerator[Changes, None]:
        """See `Directory`. Each stream begins with a read of all keys, as in `watch`."""
        async with contextlib.aclosing(self._follow(self._all)) as batches:
            async for batch in batches:
                yield self._changes(batch.events, is_whole=batch.is_whole)

    async def claim_pool(self, pool: PoolName, shard: ShardName) -> ShardName:
        """See `Directory`."""
        key = self._pools + pool.encode()
        request = rpc_pb2.TxnRequest(
            compare=[_has_revision(key, 0)],
            success=[rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=shard.encode()))],
            failure=[rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))],
        )
        response = await self._client.write(request)
        if response.succeeded:
            return shard
        return _shard_of(response.responses[0].response_range.kvs[0])

    async def release_pool(self, pool: PoolName, shard: ShardName, revision: int) -> bool:
        """See `Directory`."""
        key = self._pools + pool.encode()
        is_claimed = rpc_pb2.Compare(
            result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.VALUE, key=key, value=shard.encode()
        )
        request = rpc_pb2.TxnRequest(
            compare=[is_claimed, _has_revision(self._key(shard), revision)],
            success=[rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))],
        )
        return (await self._client.write(request)).succeeded

    async def close(self) -> None:
        """See `Directory`. Calls in progress raise DirectoryError; watches end."""
        await self._client.close()

    def _key(self, shard: ShardName) -> bytes:
        return self._shards + shard.encode()

    def _range(self, shard: ShardName) -> rpc_pb2.RangeRequest:
        return rpc_pb2.RangeRequest(key=self._key(shard))

    async def _follow(self, keys: rpc_pb2.RangeRequest) -> AsyncGenerator[_Batch, None]:
        """Yields what keys hold, then their changes, and the whole again after each lost stream."""
        backoff = Backoff(0.1, 1.0)
        while not self._client.is_closed:
            try:
                revision, pairs = await self._read_all(keys)
                yield _Batch(revision, [kv_pb2.Event(kv=pair) for pair in pairs], is_whole=True)
                with contextlib.suppress(EtcdUnavailableError):  # the read asks all members
                    changes = self._client.changes(keys, revision + 1)
                    async with contextlib.aclosing(changes):
                        async for events in changes:
                            yield _Batch(events[-1].kv.mod_revision, events, is_whole=False)
                            backoff.reset()
            except DirectoryError:
                if not self._client.is_closed:
                    raise
            await asyncio.sleep(backoff.next())

    async def _read_all(self, keys: rpc_pb2.RangeRequest) -> tuple[int, list[kv_pb2.KeyValue]]:
        """Reads keys at one revision, in pages: an answer of gRPC is at most 4 MiB."""
        pairs: list[kv_pb2.KeyValue] = []
        first_key, revision = keys.key, 0
        while True:
            request = rpc_pb2.RangeRequest(key=first_key, range_end=keys.range_end, limit=_PAGE_KEYS, revision=revision)
            response = await self._client.read(request)
            revision = revision or response.header.revision
            pairs += response.kvs
            if not response.more:
                return revision, pairs
            first_key = pairs[-1].key + b"\0"

    def _changes(self, events: Sequence[kv_pb2.Event], *, is_whole: bool) -> Changes:
        shards: dict[ShardName, VersionedRecord] = {}
        pools: dict[PoolName, ShardName | None] = {}
        for event in events:
            key, is_deleted = event.kv.key, event.type == kv_pb2.Event.DELETE
            try:
                if key.startswith(self._pools):
                    pool = _pool_name(key.removeprefix(self._pools))
                    pools[pool] = None if is_deleted else _shard_of(event.kv)
                elif key.startswith(self._shards):
                    shards[_shard_name(key.removeprefix(self._shards))] = _entry_after(event)
            except DamagedRecordError as error:
                if not is_deleted:
                    _log.error("damaged record", extra={"error": str(error)})
        return Changes(is_whole, shards, pools)


def _keys_with(prefix: bytes) -> rpc_pb2.RangeRequest:
    return rpc_pb2.RangeRequest(key=prefix, range_end=prefix[:-1] + bytes([prefix[-1] + 1]))


def _has_revision(key: bytes, revision: int) -> rpc_pb2.Compare:
    """The condition that a key was written at a revision; 0: that it does not exist."""
    return rpc_pb2.Compare(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.MOD, key=key, mod_revision=revision)


def _shard_of(pair: kv_pb2.KeyValue) -> ShardName:
    """The shard that has a pool."""
    try:
        return _shard_name(pair.value)
    except DamagedRecordError as error:
        raise DamagedRecordError(f"{_shown(pair.key)} in etcd: {error}") from error


def _shard_name(data: bytes) -> ShardName:
    text = data.decode("utf-8", "replace")
    if not NAME.fullmatch(text):
        raise DamagedRecordError(f"{_shown(data)} is no name of a shard")
    return ShardName(text)


def _pool_name(data: bytes) -> PoolName:
    text = data.decode("utf-8", "replace")
    try:
        check_pool_name("pool_name", text)
    except InvalidArgumentError as error:
        raise DamagedRecordError(f"{_shown(data)} is no name of a pool") from error
    return PoolName(text)


def _shown(data: bytes) -> str:
    """The beginning of a text that anybody may have written, for messages: printable, without line breaks."""
    text = data[:_MAX_SHOWN_BYTES].decode("ascii", "backslashreplace")
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


def _entry_of(pairs: Sequence[kv_pb2.KeyValue]) -> VersionedRecord:
    if not pairs:
        return VersionedRecord(0, None)
    (pair,) = pairs
    try:
        return VersionedRecord(pair.mod_revision, decode_record(pair.value))
    except DamagedRecordError as error:
        raise DamagedRecordError(f"{_shown(pair.key)} in etcd: {error}") from error


def _entry_after(event: kv_pb2.Event) -> VersionedRecord:
    if event.type == kv_pb2.Event.DELETE:
        return VersionedRecord(event.kv.mod_revision, None)
    return _entry_of([event.kv])
