"""Messages between a rank that lends its memory and the processes that map it; see lending.proto."""

import socket
import struct
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError

from kvpool.core.errors import InvalidArgumentError
from kvpool.v1 import lending_pb2
from kvpool.wire.errors import malformed_error

LENDING_VERSION: Final = 2
MAX_MESSAGE_BYTES: Final = 2**20

_LENGTH: Final = struct.Struct("!I")
_MessageT = TypeVar("_MessageT", lending_pb2.LendRequest, lending_pb2.LendResponse)


def encode_message(message: lending_pb2.LendRequest | lending_pb2.LendResponse) -> bytes:
    """Encodes a message with its length.

    Raises:
        InvalidArgumentError: The message is too long.
    """
    content = message.SerializeToString()
    _check_length(len(content))
    return _LENGTH.pack(len(content)) + content


class MessageReader(Generic[_MessageT]):
    """Splits a stream of bytes into messages."""

    def __init__(self, kind: type[_MessageT]) -> None:
        self._kind: type[_MessageT] = kind
        self._received = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether no part of a message is waiting for the rest."""
        return not self._received

    def feed(self, data: bytes) -> Iterator[_MessageT]:
        """Yields the messages that are complete with this data.

        Raises:
            InvalidArgumentError: The stream contains something else; it cannot be continued.
        """
        self._received += data
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            _check_length(length)
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            content = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            try:
                yield self._kind.FromString(content)
            except DecodeError:
                raise malformed_error() from None


def receive(connection: socket.socket, max_bytes: int = 2**16) -> tuple[bytes, list[int]]:
    """Receives data, and the file descriptors that accompany it; the caller closes them. Empty data: the end."""
    data, descriptors, _, _ = socket.recv_fds(connection, max_bytes, 1, socket.MSG_CMSG_CLOEXEC)
    return data, list(descriptors)


def _check_length(length: int) -> None:
    if length > MAX_MESSAGE_BYTES:
        message = f"{length} bytes long, at most {MAX_MESSAGE_BYTES} are allowed"
        raise InvalidArgumentError("message", message, reason="MESSAGE_TOO_LONG")
