"""Mutates messages: field by field, guided by the descriptors, or byte by byte."""

import math
import string
from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from random import Random
from typing import Any, Final, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.internal import encoder
from google.protobuf.message import Message

_INTEGERS: Final = (
    0,
    1,
    2,
    3,
    255,
    256,
    65_535,
    65_536,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**64 - 1,
)
_DOUBLES: Final = (0.0, -0.0, 5e-324, 0.1, 1.0, 3600.0, 3600.1, 1e308, -1.0, math.inf, -math.inf, math.nan)
_STRINGS: Final = (
    "",
    "\0",
    "p0",
    "r0",
    "../../etc/passwd",
    "ü" * 128,
    "\U0001d55c" * 65,
    "a" * 256,
    "a" * 257,
    "%s%n{0}{}",
    "\u202e",
)
_NOT_UTF8: Final = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82")
_MAX_DEPTH: Final = 8

_LIMITS: Final = {
    FieldDescriptor.TYPE_UINT32: 2**32 - 1,
    FieldDescriptor.TYPE_UINT64: 2**64 - 1,
    FieldDescriptor.TYPE_ENUM: 2**31 - 1,
}


def mutate_fields(rng: Random, message: Message) -> None:
    """Mutates one to three fields of a message or of a nested message."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _mutate_field(rng, message, 0)


def _mutate_field(rng: Random, message: Message, depth: int) -> None:
    fields = cast("Sequence[FieldDescriptor]", message.DESCRIPTOR.fields)
    if not fields or depth > _MAX_DEPTH:
        return
    present = [field for field, _ in message.ListFields()]
    field = rng.choice(present if present and rng.random() < 0.8 else fields)
    if field.message_type and field.message_type.GetOptions().map_entry:
        _mutate_map(rng, field.message_type, getattr(message, field.name))
    elif field.is_repeated:
        _mutate_repeated(rng, field, getattr(message, field.name), depth)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        within = getattr(message, field.name)
        if message.HasField(field.name) and rng.random() < 0.85:
            _mutate_field(rng, within, depth + 1)
        elif rng.random() < 0.5:
            message.ClearField(field.name)
        else:
            within.SetInParent()  # in a oneof, this replaces the field that was set
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(rng, field))


def _value(rng: Random, field: FieldDescriptor) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_DOUBLE:
            return rng.choice(_DOUBLES)
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_STRING:
            return _text(rng)
        case FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 8, 31, 32, 33, 64, 65, 320)))
        case _:
            value = rng.choice(_INTEGERS) if rng.random() < 0.6 else rng.randrange(64)
            return min(value, _LIMITS[field.type])


def _text(rng: Random) -> str:
    chance = rng.random()
    if chance < 0.6:
        return rng.choice(_STRINGS)
    if chance < 0.999:
        return "".join(rng.choices(string.printable, k=rng.randrange(40)))
    return "x" * rng.choice((10_000, 100_000))


def _mutate_repeated(rng: Random, field: FieldDescriptor, values: MutableSequence[Any], depth: int) -> None:
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if values and is_message and rng.random() < 0.6:
        _mutate_field(rng, rng.choice(values), depth + 1)
        return
    if not values:
        _append(rng, field, values)
        return
    i, j = rng.randrange(len(values)), rng.randrange(len(values))
    choice = rng.randrange(7)
    if choice == 0:
        del values[i]
    elif choice == 1:
        del values[i:]
    elif choice == 2:
        values.append(values[i])
    elif choice == 3:
        values.extend(list(values) * min(rng.choice((1, 3, 15)), 1 + 4096 // len(values)))
    elif choice == 4 and not is_message:
        values[i], values[j] = values[j], values[i]
    elif choice == 5 and not is_message:
        values[i] = _value(rng, field)
    else:
        _append(rng, field, values)


def _mutate_map(rng: Random, entry: Descriptor, values: MutableMapping[Any, Any]) -> None:
    key, value = (entry.fields_by_name[name] for name in ("key", "value"))
    if values and rng.random() < 0.3:
        del values[rng.choice(sorted(values))]
    for _ in range(rng.choice((0, 1, 1, 70))):
        values[_value(rng, key)] = _value(rng, value)


def _append(rng: Random, field: FieldDescriptor, values: MutableSequence[Any]) -> None:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        values.add()  # type: ignore[attr-defined]
    else:
        values.extend([_value(rng, field)] * rng.choice((1, 1, 2, 9)))


def _flip(rng: Random, data: bytearray, _: bytes) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _overwrite(rng: Random, data: bytearray, _: bytes) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))


def _truncate(rng: Random, data: bytearray, _: bytes) -> None:
    del data[rng.randrange(len(data)) :]


def _cut(rng: Random, data: bytearray, _: bytes) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randrange(1, 9)]


def _repeat(rng: Random, data: bytearray, _: bytes) -> None:
    at = rng.randrange(len(data))
    data[at:at] = data[at : at + rng.randrange(1, 33)] * rng.choice((1, 1, 2, 40))


def _insert(rng: Random, data: bytearray, _: bytes) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randrange(1, 9))


def _break_text(rng: Random, data: bytearray, _: bytes) -> None:
    at = rng.randrange(len(data))
    broken = rng.choice(_NOT_UTF8)
    data[at : at + len(broken)] = broken


def _join(_: Random, data: bytearray, other: bytes) -> None:
    data += other  # a message merges with what follows: fields set twice, two members of a oneof


def _add_unknown(rng: Random, data: bytearray, _: bytes) -> None:
    number = rng.choice((19, 100, 536_870_911))
    data += encoder.TagBytes(number, 2) + bytes([5]) + b"later"


_BYTE_WAYS: Final[tuple[Callable[[Random, bytearray, bytes], None], ...]] = (
    _flip,
    _overwrite,
    _truncate,
    _cut,
    _repeat,
    _insert,
    _break_text,
    _join,
    _add_unknown,
)


def mutate_bytes(rng: Random, data: bytes, other: bytes) -> bytes:
    """Mutates an encoded message; `other` is another message to join with it."""
    mutated = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        way = rng.choice(_BYTE_WAYS)
        if mutated or way in (_join, _add_unknown, _insert):
            way(rng, mutated, other)
    return bytes(mutated)
