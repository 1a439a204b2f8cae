"""Shard records as JSON.

1. Equal records are equal bytes: keys are sorted, and there is no white space.
2. Decoding is strict. A field that is unknown here may change what a record means, so it is an error; a later version
   that adds one increases FORMAT. Others than servers may have written names and addresses, which go into messages.
"""

import contextlib
import json
from reprlib import repr as short_repr
from typing import Final

from kvpool.core.errors import InvalidArgumentError, check_size
from kvpool.server.cluster.directory import (
    MAX_MEMBERS,
    MEMBER_ID_BYTES,
    NAME,
    DamagedRecordError,
    Member,
    ShardRecord,
)
from kvpool.server.codec import DamageError, from_plain, to_plain
from kvpool.wire.address import host_and_port

FORMAT: Final = 2
MAX_RECORD_BYTES: Final = 4096
MAX_MEMBER_BYTES: Final = 480
"""Maximum size of a member, so that a record has space for `MAX_MEMBERS` of them."""
_MAX_ADDRESS_BYTES: Final = 260
"""Enough for a name of 253 bytes, the maximum of DNS, with a port."""
_MAX_TERM: Final = 2**63 - 1


def encode_record(record: ShardRecord) -> bytes:
    """Encodes a record.

    Raises:
        ValueError: The record breaks a rule of ShardRecord, or is longer than MAX_RECORD_BYTES.
    """
    data = _json({"format": FORMAT, **to_plain(ShardRecord, record)})
    try:
        decode_record(data)
    except DamagedRecordError as error:
        raise ValueError(f"shard record: {error}") from error
    return data


def decode_record(data: bytes) -> ShardRecord:
    """Decodes a record.

    Raises:
        DamagedRecordError: It has another format, breaks a rule of ShardRecord, or is longer than MAX_RECORD_BYTES.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise DamagedRecordError(f"has {len(data)} bytes; the maximum is {MAX_RECORD_BYTES}")
    try:
        fields = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError("is not JSON") from error
    number = fields.pop("format", None) if isinstance(fields, dict) else None
    if type(number) is not int or number != FORMAT:
        raise DamagedRecordError(f"has format {short_repr(number)}; this version reads {FORMAT}")
    try:
        record = from_plain(ShardRecord, fields)
        _check_record(record)
    except (DamageError, InvalidArgumentError) as error:
        raise DamagedRecordError(str(error)) from error
    return record


def _check_record(record: ShardRecord) -> None:
    if not 1 <= record.term <= _MAX_TERM:
        raise DamageError(f"term: {record.term} is not a number in [1, 2**63)")
    if not 1 <= len(record.in_sync) <= MAX_MEMBERS:
        raise DamageError(f"in_sync: has {len(record.in_sync)} members; needs 1 to {MAX_MEMBERS}")
    for member in record.in_sync:
        check_member(member)
    ids = [member.member_id for member in record.in_sync]
    if ids != sorted(set(ids)):
        raise DamageError("in_sync: is not sorted by member_id, or names a member twice")
    if record.primary not in ids:
        raise DamageError(f"primary: {short_repr(record.primary)} is not in in_sync")
    if not record.change_id:
        raise DamageError("change_id: is empty")


def is_member_id(text: str) -> bool:
    """Whether a text is an id of a server: a name that is no longer than `new_member_id`."""
    return len(text) <= 2 * MEMBER_ID_BYTES and NAME.fullmatch(text) is not None


def check_member(member: Member) -> None:
    """Checks that a record can hold a member beside all others, and that other servers can use its addresses.

    Raises:
        InvalidArgumentError: It names the field of `Member`.
    """
    if not is_member_id(member.member_id):
        raise InvalidArgumentError("member_id", f"needs 1 to {2 * MEMBER_ID_BYTES} letters, digits, '.', '_' and '-'")
    _check_address("replication_address", member.replication_address)
    if not member.addresses:
        raise InvalidArgumentError("addresses", "is empty")
    for address in member.addresses:
        _check_address("addresses", address)
    size_bytes = len(_json(to_plain(Member, member)))
    if size_bytes > MAX_MEMBER_BYTES:
        message = f"the server takes {size_bytes} bytes of the shard's record; the maximum is {MAX_MEMBER_BYTES}"
        raise InvalidArgumentError("addresses", f"{message}: fewer or shorter addresses are needed")


def _check_address(field: str, address: str) -> None:
    check_size(field, address, _MAX_ADDRESS_BYTES)
    with contextlib.suppress(ValueError):
        if address.isprintable() and host_and_port(field, address):
            return
    raise InvalidArgumentError(field, f"{address!r} is not host:port")


def _json(plain: object) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
