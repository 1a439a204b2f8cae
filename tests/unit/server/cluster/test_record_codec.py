"""Shard records as JSON."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.errors import InvalidArgumentError
from kvpool.server.cluster.directory import (
    MAX_MEMBERS,
    DamagedRecordError,
    Member,
    MemberId,
    ShardRecord,
    new_member_id,
)
from kvpool.server.cluster.record_codec import MAX_RECORD_BYTES, check_member, decode_record, encode_record

A = Member(MemberId("a"), ("10.0.0.1:50051", "[::1]:50051"), "10.0.0.1:50060")
B = Member(MemberId("b"), ("host-b:50051",), "host-b:50060")
RECORD = ShardRecord(3, MemberId("b"), (A, B), "change")

names = st.text(min_size=1, max_size=20)
member_ids = st.from_regex(r"[A-Za-z0-9._-]{1,16}", fullmatch=True)
member_sets = st.lists(member_ids, min_size=1, max_size=8, unique=True).map(sorted)
hosts = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=20)
addresses = st.builds("{}:{}".format, hosts, st.integers(0, 65535))


@st.composite
def records(draw: st.DrawFn) -> ShardRecord:
    ids = draw(member_sets)
    several = st.lists(addresses, min_size=1, max_size=2).map(tuple)
    members = tuple(Member(MemberId(member_id), draw(several), draw(addresses)) for member_id in ids)
    primary = MemberId(draw(st.sampled_from(ids)))
    return ShardRecord(draw(st.integers(1, 2**63 - 1)), primary, members, draw(names))


def test_a_record_has_space_for_all_members_that_may_be_added() -> None:
    def member_with(num_bytes: int, number: int) -> Member:
        return Member(MemberId(f"{number:016}"), (f"{'h' * num_bytes}:50051",) * 2, f"{'h' * 30}:50060")

    def is_accepted(num_bytes: int) -> bool:
        try:
            check_member(member_with(num_bytes, 0))
        except InvalidArgumentError as error:
            assert error.field == "addresses"  # noqa: PT017 - of those that are not accepted
            return False
        return True

    num_bytes = max(filter(is_accepted, range(1, 250)))
    assert 100 < num_bytes < 249
    members = tuple(member_with(num_bytes, number) for number in range(MAX_MEMBERS))
    record = ShardRecord(2**63 - 1, members[-1].member_id, members, new_member_id())
    assert decode_record(encode_record(record)) == record


def test_new_members_have_valid_ids() -> None:
    check_member(replace(A, member_id=new_member_id()))


def fields_of(record: ShardRecord = RECORD) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(encode_record(record))
    return fields


def test_the_bytes_of_a_record() -> None:
    member = '{"addresses":["host-b:50051"],"member_id":"b","replication_address":"host-b:50060"}'
    expected = f'{{"change_id":"x","format":2,"in_sync":[{member}],"primary":"b","term":1}}'
    assert encode_record(ShardRecord(1, MemberId("b"), (B,), "x")) == expected.encode()


@given(records())
def test_a_decoded_record_is_the_encoded_one(record: ShardRecord) -> None:
    try:
        data = encode_record(record)
    except ValueError as error:
        assert "the maximum is" in str(error)  # noqa: PT017 - valid but for its length
    else:
        assert decode_record(data) == record


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_other_bytes_are_damaged(data: bytes) -> None:
    with pytest.raises(DamagedRecordError):
        decode_record(data)


def change(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.update(values)


def change_member(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["in_sync"][0].update(values)


MEMBER = {"member_id": "a", "addresses": ["h:1"], "replication_address": "h:2"}
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another format": (change(format=1), "has format 1; this version reads 2"),
    "a format that only equals the number": (change(format=True), "has format True"),
    "no format": (lambda fields: fields.pop("format"), "has format None"),
    "a missing field": (lambda fields: fields.pop("term"), "other fields: ['term']"),
    "an unknown field": (change(more=1), "other fields: ['more']"),
    "a missing field of a member": (
        lambda fields: fields["in_sync"][0].pop("addresses"),
        "other fields: ['addresses']",
    ),
    "an unknown field of a member": (change_member(rack="z"), "other fields: ['rack']"),
    "a term of another type": (change(term="3"), "term: '3' is not of type int"),
    "a term that is a boolean": (change(term=True), "term: True is not of type int"),
    "term 0": (change(term=0), "term: 0"),
    "a term out of range": (change(term=2**63), "term: 9223372036854775808"),
    "a primary that is not in sync": (change(primary="c"), "'c' is not in in_sync"),
    "a primary of another type": (change(primary=["b"]), "primary"),
    "an empty change_id": (change(change_id=""), "change_id"),
    "no members": (change(in_sync=[]), "0 members"),
    "too many members": (change(in_sync=[{**MEMBER, "member_id": f"m{i}"} for i in range(9)]), "9 members"),
    "members that are no list": (change(in_sync=MEMBER), "in_sync: .* is not a list"),
    "a member that is no object": (change(in_sync=["a"]), "in_sync: 'a' is not a Member"),
    "members out of order": (lambda fields: fields["in_sync"].reverse(), "not sorted"),
    "a member twice": (change(in_sync=[MEMBER, MEMBER], primary="a"), "twice"),
    "no addresses": (change_member(addresses=[]), "addresses: is empty"),
    "an address of another type": (change_member(addresses=[1]), "addresses: 1 is not of type str"),
    "a member id with a line break": (change_member(member_id="a\n"), "member_id: needs"),
    "a long member id": (change_member(member_id="a" * 17), "member_id: needs"),
    "an address without a port": (change_member(addresses=["h:1", "h"]), "addresses: 'h' is not host:port"),
    "an address with a line break": (change_member(addresses=["h\n:1"]), "addresses: 'h.*' is not host:port"),
    "an address with a surrogate": (change_member(addresses=["\ud800:1"]), "addresses: .* is not host:port"),
    "a long address": (change_member(addresses=["h" * 3000 + ":1"]), "addresses: longer than 260 bytes"),
    "a replication address that is a path": (change_member(replication_address="unix:/x"), "replication_address: "),
    "a member that takes the space of others": (change_member(addresses=["h:1"] * 100), "the maximum is 480"),
    "a long text of another kind": (change_member(member_id=["a" * 3000]), "member_id: .{0,60} is not of type str"),
    "addresses that are one text": (change_member(addresses="h:1"), "addresses: 'h:1' is not a list"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_is_refused(damage: Callable[[dict[str, Any]], Any], message: str) -> None:
    fields = fields_of()
    damage(fields)
    with pytest.raises(DamagedRecordError, match=re.sub(r"[(\[\]]", r"\\\g<0>", message)):
        decode_record(json.dumps(fields).encode())


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 4000, "NaN", "1" * 4000, "null"])
def test_text_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(DamagedRecordError):
        decode_record(text.encode())


def test_white_space_and_order_do_not_matter() -> None:
    assert decode_record(json.dumps(dict(reversed(fields_of().items())), indent=2).encode()) == RECORD


def test_a_record_of_maximum_length_is_accepted_and_a_longer_one_refused() -> None:
    room = MAX_RECORD_BYTES - len(encode_record(RECORD)) + len(RECORD.change_id)
    longest = ShardRecord(RECORD.term, RECORD.primary, RECORD.in_sync, "x" * room)
    data = encode_record(longest)
    assert len(data) == MAX_RECORD_BYTES
    assert decode_record(data) == longest
    with pytest.raises(DamagedRecordError, match="has 4097 bytes; the maximum is 4096"):
        decode_record(data + b" ")


def test_an_invalid_record_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="shard record: primary: 'c' is not in in_sync"):
        encode_record(ShardRecord(1, MemberId("c"), (A,), "x"))
