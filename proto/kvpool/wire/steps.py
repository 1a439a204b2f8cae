"""Converts steps, results and block events between protobuf messages and core values."""

from dataclasses import fields
from typing import Any, Final, assert_never

from google.protobuf.message import Message

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, Medium, packed_token_ids
from kvpool.core.ids import BlockHash, GroupId
from kvpool.core.steps.columns import Step, StepResult
from kvpool.v1 import event_pb2, step_pb2
from kvpool.wire.protocol_version import PROTOCOL_VERSION

# The fields of the core's values have the names of the messages' fields.
_STEP_NAMES: Final = [field.name for field in fields(Step)]
_RESULT_NAMES: Final = [field.name for field in fields(StepResult)]
_MEDIA: Final = {int(medium): medium for medium in Medium}


def _fields_read(message: type[Message], value: type[Step]) -> dict[int, tuple[str, bool]]:
    """Maps field numbers to the fields of a value, and whether each is a list."""
    numbers = {field.name: field.number for field in message.DESCRIPTOR.fields}
    return {numbers[field.name]: (field.name, field.default_factory is list) for field in fields(value)}


_STEP_FIELDS: Final = _fields_read(step_pb2.Step, Step)


def step_from_proto(message: step_pb2.Step) -> Step:
    """Decodes a step. The core validates it."""
    step = Step(0)
    _read(message, _STEP_FIELDS, step)
    return step


def step_to_proto(step: Step, session_id: str) -> step_pb2.Step:
    """Encodes a step, as the first of its stream.

    Raises:
        InvalidArgumentError: A value has the wrong type or is out of range for its field.
    """
    columns = {name: value for name in _STEP_NAMES if (value := getattr(step, name))}
    try:
        return step_pb2.Step(session_id=session_id, protocol_version=PROTOCOL_VERSION, **columns)
    except (TypeError, ValueError) as error:
        raise _wrong_column(columns, error) from None


def _wrong_column(columns: dict[str, Any], error: Exception) -> InvalidArgumentError:
    """Makes the error that names the column which cannot be encoded."""
    for name, value in columns.items():
        try:
            step_pb2.Step(**{name: value})
        except (TypeError, ValueError) as column_error:
            return InvalidArgumentError(name, str(column_error))
    return InvalidArgumentError("step", str(error))


def result_to_proto(result: StepResult) -> step_pb2.StepResult:
    """Encodes a step result."""
    return step_pb2.StepResult(**{name: value for name in _RESULT_NAMES if (value := getattr(result, name))})


def result_from_proto(message: step_pb2.StepResult) -> StepResult:
    """Decodes a step result. A slice copies a column at half the cost of `list`."""
    return StepResult(
        message.sequence,
        message.free_blocks,
        list(message.outcomes),  # mostly empty, and a slice of an enum's column has another type
        message.num_hit_tokens[:],
        message.num_shared_hit_tokens[:],
        message.num_new_tokens[:],
        message.shared_prefix_boundary_tokens[:],
        message.credit_tokens[:],
        message.num_prefix_blocks[:],
        message.num_new_blocks[:],
        message.block_ids[:],
        message.copied_block_ids[:],
        message.reserve_wanted,
        message.num_host_hit_tokens[:],
    )


def _read(message: Message, numbers: dict[int, tuple[str, bool]], value: Step) -> None:
    """Copies the fields that are set in the message. Most are not."""
    for descriptor, column in message.ListFields():
        field = numbers.get(descriptor.number)
        if field:
            setattr(value, field[0], column[:] if field[1] else column)  # a slice costs half of list()


def event_to_proto(event: BlockEvent) -> event_pb2.BlockEvent:
    """Encodes a block event."""
    match event:
        case BlockStored():
            stored = event_pb2.BlockStored(
                block_hashes=event.block_hashes,
                parent_block_hash=event.parent_block_hash or b"",
                token_ids=event.token_ids,
                block_size=event.block_size,
                lora_name=event.lora_name or "",
                group_id=event.group_id,
                lookahead_token_ids=event.lookahead_token_ids,
                medium=event.medium,  # type: ignore[arg-type]  # has the proto's number
            )
            return event_pb2.BlockEvent(stored=stored)
        case BlockRemoved():
            removed = event_pb2.BlockRemoved(
                block_hash=event.block_hash,
                group_id=event.group_id,
                copies_left=event.copies_left,
                medium=event.medium,  # type: ignore[arg-type]  # has the proto's number
            )
            return event_pb2.BlockEvent(removed=removed)
        case AllBlocksCleared():
            return event_pb2.BlockEvent(cleared=event_pb2.AllBlocksCleared())
        case _:
            assert_never(event)


def event_from_proto(message: event_pb2.BlockEvent) -> BlockEvent | None:
    """Decodes a block event; None for a kind or a medium of a newer server."""
    match message.WhichOneof("event"):
        case "stored" if message.stored.medium in _MEDIA:
            stored = message.stored
            return BlockStored(
                block_hashes=tuple(map(BlockHash, stored.block_hashes)),
                parent_block_hash=BlockHash(stored.parent_block_hash) if stored.parent_block_hash else None,
                token_ids=packed_token_ids(stored.token_ids),
                block_size=stored.block_size,
                lora_name=stored.lora_name or None,
                group_id=GroupId(stored.group_id),
                lookahead_token_ids=packed_token_ids(stored.lookahead_token_ids),
                medium=_MEDIA[stored.medium],
            )
        case "removed" if message.removed.medium in _MEDIA:
            removed, medium = message.removed, _MEDIA[message.removed.medium]
            return BlockRemoved(BlockHash(removed.block_hash), GroupId(removed.group_id), removed.copies_left, medium)
        case "cleared":
            return AllBlocksCleared()
        case _:
            return None
