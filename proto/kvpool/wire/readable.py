"""Messages as JSON, and members of their enums as words."""

from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

_NumberT = TypeVar("_NumberT", bound=int)


def message_json(message: Message) -> dict[str, Any]:
    """Returns a message as protobuf's JSON: fields by their names in the proto, those with default values included.

    64-bit integers are strings, because readers such as JavaScript have 53 bits. Bytes are in base64.
    """
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def words(kind: "_EnumTypeWrapper[_NumberT]") -> dict[_NumberT, str]:
    """Returns the members of an enum as people read them, such as "ready" for POOL_STATE_READY, by number."""
    prefix = kind.keys()[0].removesuffix("UNSPECIFIED")
    return {number: name.removeprefix(prefix).lower() for name, number in kind.items() if number}


def word(kind: "_EnumTypeWrapper[_NumberT]", number: _NumberT) -> str:
    """Returns a member of an enum as people read it; "unknown" for a member that only newer servers know."""
    return words(kind).get(number, "unknown")
