"""Parses the messages of clients, and refuses those that would take much time or memory.

1. Messages of up to `SMALL_MESSAGE_BYTES` are parsed at once.
2. Larger ones are refused before they are parsed, unless their method is for tokens, blocks or layers. So a call that
   stays open, such as a watch, keeps a small request.
3. Large ones with more fields than a step, or a rank with all its layers, can have are refused before they are parsed.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from kvpool.core.errors import ExhaustedError
from kvpool.server.limits.config import Limits
from kvpool.wire.message_fields import has_more_fields

SMALL_MESSAGE_BYTES: Final = 65_536
"""Maximum size of a message that is parsed without further checks; and of all messages of most methods."""
MAX_LAYER_FIELDS: Final = 65_536
"""Maximum number of fields of a message with layers: groups, names and specs of up to 4,096 layers."""
_OTHER_FIELDS: Final = 1_024
_FIELDS_PER_OPERATION: Final = 2
"""Those of an operation that are not packed: the id of its request and the name of its LoRA."""
_WITH_LAYERS: Final = frozenset(("kvpool.v1.AllocatorService/CreatePool", "kvpool.v1.WorkerService/Join"))
_WITH_TOKENS: Final = frozenset(
    f"kvpool.v1.AllocatorService/{method}"
    for method in (
        "Schedule",
        "GetComputedBlocks",
        "AllocateSlots",
        "CacheBlocks",
        "Free",
        "GetCommonPrefixBlocks",
        "EvictBlocks",
    )
) | {"kvpool.v1.AdminService/ExplainPrompt"}
"""Methods whose requests may be large."""

LARGE_MESSAGE_BYTES: Final[ContextVar[int]] = ContextVar("kvpool_large_message_bytes", default=0)
"""Size of the newest message of the current task's call, if it is larger than `SMALL_MESSAGE_BYTES`; 0 otherwise."""


def parser_of(parse: Callable[[bytes], Any] | None, method: str, limits: Limits) -> Callable[[bytes], Any] | None:
    """Returns the function that parses the requests of a method in place of `parse`, if it has one.

    It raises ExhaustedError for messages that are too large.
    """
    if parse is None:
        return None
    descriptor = parse.__self__.DESCRIPTOR  # type: ignore[attr-defined]  # of the message's class with this `FromString`
    is_large = method in _WITH_LAYERS or method in _WITH_TOKENS
    max_fields = MAX_LAYER_FIELDS
    if method in _WITH_TOKENS:
        max_fields = _FIELDS_PER_OPERATION * limits.max_step_operations + _OTHER_FIELDS

    def checked(data: bytes) -> Any:  # noqa: ANN401 - a message
        if len(data) <= SMALL_MESSAGE_BYTES and not LARGE_MESSAGE_BYTES.get():
            return parse(data)  # nearly all; every step pays for this line
        try:
            num_bytes = len(data)
            LARGE_MESSAGE_BYTES.set(num_bytes if num_bytes > SMALL_MESSAGE_BYTES else 0)
            if num_bytes > SMALL_MESSAGE_BYTES and not is_large:
                raise _too_large(f"{num_bytes} bytes; the maximum for this method is {SMALL_MESSAGE_BYTES}")
            if num_bytes > SMALL_MESSAGE_BYTES and has_more_fields(data, descriptor, max_fields):
                raise _too_large(f"more than {max_fields} fields, the maximum")
            return parse(data)
        finally:
            del data  # a traceback would keep it

    return checked


def _too_large(message: str) -> ExhaustedError:
    return ExhaustedError("MESSAGE_TOO_LARGE", message)
