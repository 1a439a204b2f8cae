"""Errors of the core. Each error carries hints for a transport; the core knows no transport.

Rule 1: an error is raised before anything is changed.
Rule 2: the message is written for the caller and contains nothing about another session.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

OUT_OF_MEMORY: Final = "OUT_OF_MEMORY"
OUT_OF_MEMORY_RETRY_SECONDS: Final = 1.0
MAX_MESSAGE_CHARACTERS: Final = 2000
"""A message may quote a value that a client chose. A longer one is cut off, so that a transport can carry it."""

_Number = TypeVar("_Number", int, float)


class KvpoolError(Exception):
    """Base class of all errors that the core raises deliberately.

    Attributes:
        message: Description of the error, without the field's name; at most `MAX_MESSAGE_CHARACTERS` and a mark.
        reason: An UPPER_SNAKE_CASE constant that programs can match.
        field: The invalid input, by its name on the wire; empty if no single input is at fault.
        retry_seconds: Delay after which the caller can retry; None if a retry does not help.
        was_sent: Whether a server may have read the call; False only where a client had no connection.
    """

    was_sent = True

    def __init__(self, reason: str, message: str, *, field: str = "", retry_seconds: float | None = None) -> None:
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = message[:MAX_MESSAGE_CHARACTERS] + " ..."
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_seconds = retry_seconds

    def rename_field(self, field: str) -> None:
        """Replaces the field's name with the name that the caller knows."""
        self.field = field
        self.args = (f"{field}: {self.message}" if field else self.message,)


class InvalidArgumentError(KvpoolError):
    """An input is malformed, out of range, or over a limit. The caller must fix `field`."""

    def __init__(self, field: str, message: str, *, reason: str = "INVALID_VALUE") -> None:
        super().__init__(reason, message, field=field)


class NotFoundError(KvpoolError):
    """The pool, session or request does not exist. The caller must create it."""


class WrongStateError(KvpoolError):
    """The call is valid, but not in the current state. The caller waits, or fixes the condition that `reason` names."""


class AbortedError(KvpoolError):
    """The session was ended by lease expiry, a new epoch, an operator or the exit of a process.

    The caller opens a new session and recomputes.
    """


class UnavailableError(KvpoolError):
    """The server cannot serve the call now. The caller retries after `retry_seconds`."""


class NotPrimaryError(UnavailableError):
    """The server is not the primary of its shard, or not any more. The caller calls the primary.

    It may have executed the call before it learned that. Then either the primary has the change too, or the change is
    lost with this server's state: a retry with the same number is right in both cases.

    Attributes:
        addresses: Addresses of the primary; empty if the server does not know them now.
        term: Number of the primary's term, as far as the server knows; 0 if it knows none.
    """

    def __init__(self, addresses: tuple[str, ...], term: int, message: str = "") -> None:
        where = f"the primary of term {term} is at {', '.join(addresses)}" if addresses else "it knows no primary now"
        super().__init__("NOT_PRIMARY", message or f"the server is not the primary of its shard; {where}")
        self.addresses = addresses
        self.term = term


class ExhaustedError(KvpoolError):
    """The call exceeds a limit that protects other clients, such as the message size. The caller sends less."""


class UnauthenticatedError(KvpoolError):
    """The token is missing, unknown, expired or revoked. The caller needs a valid token."""


class DeniedError(KvpoolError):
    """The caller is authenticated, but not permitted. The message does not reveal whether the resource exists."""


def out_of_memory() -> ExhaustedError:
    """The refusal of a change for which the process has too little memory, before anything is changed."""
    message = "the server has too little memory for it now"
    return ExhaustedError(OUT_OF_MEMORY, message, retry_seconds=OUT_OF_MEMORY_RETRY_SECONDS)


@contextmanager
def fields_renamed(rename: Callable[[str], str]) -> Iterator[None]:
    """Renames the field of an error of the block to the name that the caller knows."""
    try:
        yield
    except InvalidArgumentError as error:
        error.rename_field(rename(error.field))
        raise


def size_bytes(text: str) -> int:
    """Length of a text in UTF-8; each lone surrogate, which only a caller in this process can pass, counts three."""
    return len(text.encode("utf-8", "surrogatepass"))


def check_size(field: str, text: str, max_bytes: int) -> None:
    """Checks the length of a text in UTF-8.

    Raises:
        InvalidArgumentError: It is too long.
    """
    if size_bytes(text) > max_bytes:
        raise InvalidArgumentError(field, f"longer than {max_bytes} bytes")


def check_setting(name: str, value: float, low: float, high: float) -> None:
    """Raises ValueError if a value of a configuration is not in [low, high]."""
    if not low <= value <= high:
        raise ValueError(f"{name}: {value} is not in [{low}, {high}]")


def check_range(field: str, value: _Number, low: _Number, high: _Number) -> _Number:
    """Returns `value` if it is in [low, high].

    Raises:
        InvalidArgumentError: The value is out of range.
    """
    if not low <= value <= high:
        raise InvalidArgumentError(field, f"{value} is not in [{low}, {high}]")
    return value
