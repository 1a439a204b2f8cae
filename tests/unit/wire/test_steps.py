"""Steps and results round-trip through protobuf."""

from array import array
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.events import BlockRemoved, BlockStored, Medium
from kvpool.core.ids import BlockHash, GroupId
from kvpool.core.steps.columns import Step, StepResult
from kvpool.v1 import event_pb2
from kvpool.wire import steps as wire_steps

_ValueT = TypeVar("_ValueT", Step, StepResult)
STRINGS, FLAGS = {"request_ids", "lora_names"}, {"declares", "delay_cache_blocks", "full_sequence_must_fit"}
CODES = {"operations": [2, 13, 4], "outcomes": [0, 5, 2]}


def with_all_fields(kind: type[_ValueT]) -> _ValueT:
    """A value whose fields all differ."""
    values: dict[str, Any] = {}
    for number, field in enumerate(fields(kind), 1):
        if field.name in STRINGS:
            values[field.name] = [f"{field.name} {i}" for i in range(3)]
        elif field.name in FLAGS:
            values[field.name] = [bool(number & bit) for bit in (1, 2, 4, 8, 16)]
        elif field.name in CODES:
            values[field.name] = CODES[field.name]
        elif field.default is False:
            values[field.name] = True
        elif field.default_factory is not MISSING:
            values[field.name] = [number, 0, number + 2**31]
        else:
            values[field.name] = b"hash" * number if field.default == b"" else number
    return kind(**values)


def test_a_step_keeps_all_its_fields() -> None:
    step = with_all_fields(Step)
    assert wire_steps.step_from_proto(wire_steps.step_to_proto(step, "s")) == step


def test_a_result_keeps_all_its_fields() -> None:
    result = with_all_fields(StepResult)
    assert wire_steps.result_from_proto(wire_steps.result_to_proto(result)) == result


def test_empty_columns_stay_empty() -> None:
    assert wire_steps.step_from_proto(wire_steps.step_to_proto(Step(7), "s")) == Step(7)
    assert wire_steps.result_from_proto(wire_steps.result_to_proto(StepResult(7))) == StepResult(7)


@pytest.mark.parametrize("name", ["request_numbers", "num_taken_tokens", "num_new_tokens"])
def test_a_value_out_of_its_range_is_refused_with_its_column(name: str) -> None:
    step = Step(1)
    setattr(step, name, [-1])
    with pytest.raises(InvalidArgumentError) as caught:
        wire_steps.step_to_proto(step, "s")
    assert caught.value.field == name


def test_a_stored_run_keeps_all_its_fields() -> None:
    hashes, tokens, ahead = (BlockHash(b"1" * 8), BlockHash(b"2" * 8)), array("I", range(4)), array("I", [2, 2**31])
    stored = BlockStored(hashes, BlockHash(b"p" * 8), tokens, 2, "lora", GroupId(3), ahead, Medium.HOST_MEMORY)
    assert wire_steps.event_from_proto(wire_steps.event_to_proto(stored)) == stored


def test_an_event_without_a_medium_is_of_the_first_tier() -> None:
    removed = BlockRemoved(BlockHash(b"1" * 8), GroupId(3), 2)
    message = wire_steps.event_to_proto(removed)
    assert [field.name for field, _ in message.removed.ListFields()] == ["block_hash", "group_id", "copies_left"]
    assert wire_steps.event_from_proto(message) == removed
    assert sorted(map(int, Medium)) == sorted(map(int, event_pb2.Medium.values()))
    message.removed.medium = event_pb2.MEDIUM_HOST_MEMORY
    assert wire_steps.event_from_proto(message) == replace(removed, medium=Medium.HOST_MEMORY)


@pytest.mark.parametrize("kind", ["stored", "removed"])
def test_an_event_of_an_unknown_medium_is_ignored(kind: str) -> None:
    message = event_pb2.BlockEvent()
    getattr(message, kind).medium = 77
    assert wire_steps.event_from_proto(message) is None
