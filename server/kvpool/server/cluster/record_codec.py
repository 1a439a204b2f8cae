"""Shard records as JSON.

1. Equal records are equal bytes: keys are sorted, and there is no white space.
2. Decoding is strict. A field that is unknown here may change what a record means, so it is an error; a later version
   that adds one increases FORMAT. Others than servers may have written names and addresses, which go into messages.
"""

import contextlib
import json
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any, Final, TypeGuard

from kvpool.core.errors import InvalidArgumentError, check_size
from kvpool.server.cluster.directory import (
    MAX_MEMBERS,
    MEMBER_ID_BYTES,
    NAME,
    DamagedRecordError,
    Member,
    MemberId,
    ShardRecord,
)
from kvpool.wire.address import host_and_port

FORMAT: Final = 1
MAX_RECORD_BYTES: Final = 4096
MAX_MEMBER_BYTES: Final = 480
"""Maximum size of a member, so that a record has space for `MAX_MEMBERS` of them."""
_MAX_ADDRESS_BYTES: Final = 260
"""Enough for a name of 253 bytes, the maximum of DNS, with a port."""
_MAX_TERM: Final = 2**63 - 1
_RECORD_FIELDS: Final = {"format", "term", "primary", "in_sync", "change_id"}
_MEMBER_FIELDS: Final = {"member_id", "addresses", "replication_address", "zone"}


def encode_record(record: ShardRecord) -> bytes:
    """Encodes a record.

    Raises:
        ValueError: The record breaks a rule of ShardRecord, or is longer than MAX_RECORD_BYTES.
    """
    fields = {
        "format": FORMAT,
        "term": record.term,
        "primary": record.primary,
        "in_sync": [_fields_of(member) for member in record.in_sync],
        "change_id": record.change_id,
    }
    data = _encode(fields)
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
        value: object = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError("is not JSON") from error
    fields = _object(value, "the record")
    if fields.get("format") != FORMAT or isinstance(fields.get("format"), bool | float):
        raise DamagedRecordError(f"has format {short_repr(fields.get('format'))}; this version reads {FORMAT}")
    _check_names(fields, _RECORD_FIELDS, "the record")
    term = fields["term"]
    if not isinstance(term, int) or isinstance(term, bool) or not 1 <= term <= _MAX_TERM:
        raise DamagedRecordError(f"term: {short_repr(term)} is not a number in [1, 2**63)")
    members = tuple(_member(member) for member in _list(fields["in_sync"], "in_sync"))
    if not 1 <= len(members) <= MAX_MEMBERS:
        raise DamagedRecordError(f"in_sync: has {len(members)} members; needs 1 to {MAX_MEMBERS}")
    ids = [member.member_id for member in members]
    if ids != sorted(set(ids)):
        raise DamagedRecordError("in_sync: is not sorted by member_id, or names a member twice")
    primary = MemberId(_text(fields["primary"], "primary"))
    if primary not in ids:
        raise DamagedRecordError(f"primary: {short_repr(primary)} is not in in_sync")
    return ShardRecord(term, primary, members, _text(fields["change_id"], "change_id"))


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
    if member.zone and not NAME.fullmatch(member.zone):
        raise InvalidArgumentError("zone", "needs 1 to 64 letters, digits, '.', '_' and '-'")
    _check_address("replication_address", member.replication_address)
    if not member.addresses:
        raise InvalidArgumentError("addresses", "is empty")
    for address in member.addresses:
        _check_address("addresses", address)
    size_bytes = len(_encode(_fields_of(member)))
    if size_bytes > MAX_MEMBER_BYTES:
        message = f"the server takes {size_bytes} bytes of the shard's record; the maximum is {MAX_MEMBER_BYTES}"
        raise InvalidArgumentError("addresses", f"{message}: fewer or shorter addresses are needed")


def _check_address(field: str, address: str) -> None:
    check_size(field, address, _MAX_ADDRESS_BYTES)
    with contextlib.suppress(ValueError):
        if address.isprintable() and host_and_port(field, address):
            return
    raise InvalidArgumentError(field, f"{address!r} is not host:port")


def _fields_of(member: Member) -> dict[str, object]:
    return {
        "member_id": member.member_id,
        "addresses": list(member.addresses),
        "replication_address": member.replication_address,
        "zone": member.zone,
    }


def _encode(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _member(value: object) -> Member:
    fields = _object(value, "a member")
    _check_names(fields, _MEMBER_FIELDS, "a member")
    member = Member(
        MemberId(_text(fields["member_id"], "member_id")),
        tuple(_text(address, "addresses") for address in _list(fields["addresses"], "addresses")),
        _text(fields["replication_address"], "replication_address"),
        "" if fields["zone"] == "" else _text(fields["zone"], "zone"),
    )
    try:
        check_member(member)
    except InvalidArgumentError as error:
        raise DamagedRecordError(str(error)) from error
    return member


def _object(value: object, where: str) -> Mapping[str, object]:
    if not _is_object(value):
        raise DamagedRecordError(f"{where} is not a JSON object")
    return value


def _is_object(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)  # the keys of a JSON object are strings


def _check_names(fields: Mapping[str, object], expected: set[str], where: str) -> None:
    if missing := sorted(expected - fields.keys()):
        raise DamagedRecordError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(fields.keys() - expected):
        raise DamagedRecordError(f"{where} has unknown fields: {short_repr(unknown)}")


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise DamagedRecordError(f"{name}: is not a list")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise DamagedRecordError(f"{name}: {short_repr(value)} is not a text, or empty")
    return value
