"""The directory in etcd: the key `/kvpool/SHARD`.

The record's revision is the `mod_revision` of the key, so it increases over a deletion, too.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from kvpool.etcd import kv_pb2, rpc_pb2
from kvpool.server.cluster.directory import (
    DamagedRecordError,
    DirectoryError,
    ShardRecord,
    SwapResult,
    VersionedRecord,
)
from kvpool.server.cluster.etcd_client import EtcdClient
from kvpool.server.cluster.etcd_config import EtcdConfig
from kvpool.server.cluster.etcd_errors import EtcdUnavailableError
from kvpool.server.cluster.record_codec import decode_record, encode_record
from kvpool.wire.backoff import Backoff

_MAX_SHOWN_BYTES: Final = 256


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
        self._key = config.key
        self._range = rpc_pb2.RangeRequest(key=self._key)

    async def get(self) -> VersionedRecord:
        """See `Directory`."""
        return _entry_of((await self._client.read(self._range)).kvs)

    async def compare_and_swap(self, revision: int, record: ShardRecord) -> SwapResult:
        """See `Directory`. A swap that finds its own `change_id` has won: an earlier attempt was applied.

        Raises:
            ValueError: The record is invalid.
        """
        request = rpc_pb2.TxnRequest(
            compare=[_has_revision(self._key, revision)],
            success=[rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=self._key, value=encode_record(record)))],
            failure=[rpc_pb2.RequestOp(request_range=self._range)],
        )
        response = await self._client.write(request)
        if response.succeeded:
            return SwapResult(won=True, entry=VersionedRecord(response.header.revision, record))
        found = _entry_of(response.responses[0].response_range.kvs)
        return SwapResult(won=found.record is not None and found.record.change_id == record.change_id, entry=found)

    async def watch(self) -> AsyncGenerator[VersionedRecord, None]:
        """See `Directory`.

        An entry without a record has the revision of the deletion, or of the read. A swap needs revision 0 then.
        Each stream begins with a read, so a lost connection, a compaction and an expired token need no rules of their
        own. Changes between the end of a stream and the read are left out, except for the last one.
        """
        last: VersionedRecord | None = None
        backoff = Backoff(0.1, 1.0)
        while not self._client.is_closed:
            try:
                response = await self._client.read(self._range)
                now = _entry_of(response.kvs) if response.kvs else VersionedRecord(response.header.revision, None)
                is_still_none = last is not None and last.record is None and now.record is None
                if now != last and not is_still_none:
                    last = now
                    yield now
                with contextlib.suppress(EtcdUnavailableError):  # the read asks all members
                    changes = self._client.changes(self._range, response.header.revision + 1)
                    async with contextlib.aclosing(changes):
                        async for events in changes:
                            for event in events:
                                last = _entry_after(event)
                                yield last
                            backoff.reset()
            except DirectoryError:
                if not self._client.is_closed:
                    raise
            await asyncio.sleep(backoff.next())

    async def close(self) -> None:
        """See `Directory`. Calls in progress raise DirectoryError; watches end."""
        await self._client.close()


def _has_revision(key: bytes, revision: int) -> rpc_pb2.Compare:
    """The condition that a key was written at a revision; 0: that it does not exist."""
    return rpc_pb2.Compare(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.MOD, key=key, mod_revision=revision)


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
