"""Tests of journal/codec.py; they cite its rules."""

from array import array
from collections import OrderedDict, deque
from typing import Any

import pytest

from kvpool.core.ids import BlockId
from kvpool.core.sessions.request import BlockTable
from kvpool.core.specs.pool_config import HashScheme, ReuseOrder
from kvpool.core.steps.columns import Operation
from kvpool.server.journal.codec import Decoder, Encoder, dumps, loads
from kvpool.server.journal.frames import DamageError
from kvpool.server.journal.messages import WireMessages
from kvpool.v1 import allocator_pb2, step_pb2

WIRE = WireMessages()


def round_trip(value: object) -> Any:
    encoder = Encoder(WIRE)
    node = loads(dumps(encoder.node(value)))
    return Decoder(WIRE, encoder.classes).value(node)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        float("inf"),
        "text",
        b"bytes",
        (1, (2, "x")),
        [1, 2, 3],
        [1, 2, 3, 4, 5, -6],
        [2**64, 1, 2, 3, 4],
        [b"a", b"bc", b"", b"d", b"e"],
        [True, False, True, True, True],
        [1, None, "a", b"b", 2.0],
        deque([1, 2]),
        {"a": 1, (2, 3): [4]},
        OrderedDict([(3, 1), (1, 2)]),
        {3, 1, 2},
        bytearray(b"xyz"),
        array("I", [1, 2, 2**32 - 1]),
        ReuseOrder.LRU,
        Operation.RESET,
        HashScheme(none_hash=b"n" * 32),
        step_pb2.Step(sequence=3, request_numbers=[1, 2]),
        allocator_pb2.FreeRequest(session_id="s", preempted=True),
    ],
    ids=repr,
)
def test_values_are_decoded_with_their_types(value: object) -> None:
    found = round_trip([value])[0]
    assert found == value
    assert type(found) is type(value)


def test_object_identity_is_kept() -> None:
    table = BlockTable([BlockId(1)])
    first, second, ids = round_trip([table, table, table.block_ids])
    assert first is second
    assert first.block_ids is ids


def test_the_same_graph_gives_the_same_bytes() -> None:
    def encoded(names: list[str]) -> bytes:
        return dumps(Encoder(WIRE).node(set(names)))

    assert encoded(["a", "b", "c"]) == encoded(["c", "b", "a"])


def test_objects_outside_the_core_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot be encoded"):
        Encoder(WIRE).node([object()])


@pytest.mark.parametrize(
    "classes",
    [
        [["request.BlockTable", ["block_ids", "num_cached"]]],
        [["request.BlockTable", ["block_ids", "num_cached", "num_skipped", "more"]]],
        [["pathlib.Path", []]],
        [["allocator.Allocator", ["drain_state"]]],
    ],
)
def test_classes_that_differ_in_this_version_are_refused(classes: list[list[Any]]) -> None:
    with pytest.raises(DamageError):
        Decoder(WIRE, classes)


@pytest.mark.parametrize(
    "node",
    [["?"], ["m", 3], ["c", 0], ["e", "config.ReuseOrder", "NONE"], ["w", 99, b""], ["b", b"1234", b"x"], [["l"]]],
)
def test_a_malformed_value_is_damage(node: object) -> None:
    with pytest.raises(DamageError):
        Decoder(WIRE).value(node)


def test_bytes_that_are_not_cbor_are_damage() -> None:
    with pytest.raises(DamageError):
        loads(b"\xff\xff")
