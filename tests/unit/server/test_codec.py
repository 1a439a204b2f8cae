"""Tests of server/codec.py; they cite its rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvpool.core.blocks.quota import Quota
from kvpool.core.commands import Command, ResumePool, SuspendPool
from kvpool.core.ids import BlockId, SessionId
from kvpool.core.snapshots import Column, left_out
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs
from kvpool.core.specs.pool_config import HashScheme, ReuseOrder
from kvpool.server.codec import DamageError, decode, dumps, encode, encode_apart, loads, values_of_slice


@dataclass(slots=True)
class Part:
    number: int
    late: str = field(init=False, default="")
    derived: int = field(default=7, metadata=left_out("follows from number"))


def part() -> Part:
    made = Part(3, derived=8)
    made.late = "set"
    return made


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (None | int, None),
        (bool, True),
        (int, -(2**70)),
        (float, float("inf")),
        (float, 3),
        (str | float, "text"),
        (bytes, b"bytes"),
        (SessionId, SessionId("s")),
        (tuple[int, tuple[str | None, ...]], (1, ("x", None))),
        (list[BlockId], [1, 2**40, -6]),
        (list[tuple[int, str]], [(1, "a"), (2, "b")]),
        (dict[int, dict[str, list[int]]], {3: {"b": [1], "a": []}, 1: {}}),
        (Mapping[str, HashScheme], {"x": HashScheme(none_hash=b"n" * 32)}),
        (set[str], {"a"}),
        (ReuseOrder, ReuseOrder.LRU),
        (Quota, Quota(1, 2)),
        (KVCacheSpec, FullAttentionSpec(4)),
        (list[KVCacheSpec], [MLAAttentionSpec(4), UniformTypeKVCacheSpecs(4, (("layer", FullAttentionSpec(4)),))]),
        (Command, SuspendPool("m")),
    ],
    ids=repr,
)
def test_rule_1_values_are_decoded_with_their_types(kind: Any, value: object) -> None:
    found = decode(kind, encode(kind, value))
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)  # in the same order


def test_a_dataclass_without_the_fields_left_out() -> None:
    found = decode(Part, encode(Part, part()))
    assert (found.number, found.late, found.derived) == (3, "set", 7)


def test_the_same_value_gives_the_same_bytes() -> None:
    kind: Any = set[str]
    assert encode(kind, {"a", "b", "c"}) == encode(kind, {"c", "b", "a"})


def test_values_of_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot be encoded"):
        encode(object, object())


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (int, None),
        (int, True),
        (float, "1"),
        (str, b"s"),
        (list[int], [1, "2"]),
        (list[int], 3),
        (list[Quota], {"min_blocks": 1}),
        (tuple[int, str], [1]),
        (tuple[int, ...], ["1"]),
        (dict[int, int], [[1, 2]]),
        (dict[int, int], {"1": 2}),
        (ReuseOrder, "NONE"),
        (Quota, {"min_blocks": 1}),
        (Quota, {"min_blocks": 1, "max_blocks": 2, "more": 3}),
        (Quota, [1, 2]),
        (KVCacheSpec, {"block_size": 1}),
        (KVCacheSpec, ["Path", {}]),
        (KVCacheSpec, ["SuspendPool", {"pool_name": "m"}]),
        (KVCacheSpec, ["FullAttentionSpec", {}]),
        (Command, ["Command", {}]),
        (Column[int], 0),
    ],
    ids=repr,
)
def test_rule_2_anything_else_is_damage(kind: Any, plain: object) -> None:
    with pytest.raises(DamageError):
        decode(kind, dumps(plain))


def test_a_value_that_its_class_refuses_is_damage() -> None:
    kind: Any = KVCacheSpec
    encoded = loads(encode(kind, FullAttentionSpec(4)))
    encoded[1]["block_size"] = -1
    with pytest.raises(DamageError, match="block_size"):
        decode(kind, dumps(encoded))


def test_rule_3_columns_are_encoded_apart() -> None:
    kind: Any = list[Column[int]]
    encoded, columns = encode_apart(kind, [Column([1, 2]), Column([2**40], slice_length=1)])
    assert [list(map(values_of_slice, column.slices())) for column in columns] == [[[1, 2]], [[2**40]]]
    assert [list(column.values) for column in decode(kind, encoded, {0: [4], 1: [5, 6]})] == [[4], [5, 6]]
    wrong: list[dict[int, list[Any]] | None] = [{0: [4], 1: ["5"]}, {0: [4]}, None]
    for others in wrong:
        with pytest.raises(DamageError):
            decode(kind, encoded, others)


def test_commands_of_two_classes_differ() -> None:
    kind: Any = Command
    assert encode(kind, SuspendPool("m")) != encode(kind, ResumePool("m"))


@pytest.mark.parametrize("encoded", [b"", b"\xff\xff", b"\x81" * 10_000])
def test_bytes_that_are_not_cbor_are_damage(encoded: bytes) -> None:
    with pytest.raises(DamageError):
        loads(encoded)
