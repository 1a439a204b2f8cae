"""Conversions of fields and enum members that have the same names in the core and in the protos."""

from collections.abc import Collection, MutableSequence
from dataclasses import fields
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

_SINGLE: Final = (int, str, bytes, float, tuple)
"""Types of most values; the test for a repeated field of a message takes ten times as long."""
_MemberT = TypeVar("_MemberT", bound=Enum)
_NumberT = TypeVar("_NumberT", bound=int)


def field_values(kind: "type[DataclassInstance]", source: object, without: Collection[str] = ()) -> dict[str, Any]:
    """Reads the fields of a dataclass from one of its values, or from a message with fields of the same names.

    Args:
        kind: The dataclass.
        source: The value or the message. Repeated fields of a message are read as tuples.
        without: Fields that are left out, because the caller converts them.
    """
    values = {}
    for name in _field_names(kind):
        if name not in without:
            value = getattr(source, name)
            is_repeated = not isinstance(value, _SINGLE) and isinstance(value, MutableSequence)
            values[name] = tuple(value) if is_repeated else value
    return values


@cache
def _field_names(kind: "type[DataclassInstance]") -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


class EnumNumbers(Generic[_MemberT, _NumberT]):
    """The numbers of an enum's members. In the proto, each name has the prefix of the name that ends in UNSPECIFIED."""

    def __init__(self, kind: type[_MemberT], wire: "_EnumTypeWrapper[_NumberT]") -> None:
        prefix = wire.keys()[0].removesuffix("UNSPECIFIED")
        self._numbers = {member: wire.Value(f"{prefix}{member.name}") for member in kind}
        self._members: dict[int, _MemberT] = {int(number): member for member, number in self._numbers.items()}

    def number(self, member: _MemberT) -> _NumberT:
        """Returns the number of a member."""
        return self._numbers[member]

    def member(self, number: int) -> _MemberT | None:
        """Returns the member with a number; None if the number is unspecified or unknown."""
        return self._members.get(number)
