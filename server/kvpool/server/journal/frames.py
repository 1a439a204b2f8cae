"""Frames of a journal's files, and of the streams between the servers of a shard.

1. A frame is a head (length, kind, checksum of the payload, checksum of these three) and a payload.
2. Files grow frame by frame until the writing process dies. Then the last frame may be incomplete (*torn*): its change
   was not answered yet. Everything else is damage, including complete frames with a wrong checksum.
"""

import struct
from collections.abc import Generator
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO, Final
from zlib import crc32

MAGIC: Final = b"kvpool1\n"
_HEAD: Final = struct.Struct("<IBI")
_CHECK: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _CHECK.size
MAX_PAYLOAD_BYTES: Final = 2**31
DAMAGE: Final = bytes(HEAD_BYTES)
"""No head of a frame. A file that ends with it is damaged."""


class FrameKind(IntEnum):
    """Kind of a payload."""

    HEADER = 1
    """First frame of every file: names the file and its writer."""
    RECORD = 2
    """A change."""
    SNAPSHOT = 4
    """First frame of a snapshot: everything except its columns."""
    SLICE = 5
    """Part of a snapshot: a slice of a column."""
    END = 6
    """Last frame of a snapshot, and of a log that another log follows."""
    POOLS = 7
    """Names, configurations and epochs of the pools."""
    HELLO = 16
    """First frame of a follower: who it is, and what it has."""
    WELCOME = 17
    """Answer to HELLO: from where the primary sends."""
    REFUSED = 18
    """Answer to HELLO, before the stream ends: why."""
    MARK = 19
    """A position without a change."""
    ACKNOWLEDGED = 20
    """The last position that a follower has executed."""


class DamageError(Exception):
    """A file has content that the server never writes."""


MALFORMED: Final = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Exceptions raised when a payload with a valid checksum has malformed content."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame read from a file.

    Attributes:
        kind: Kind of the payload.
        payload: The content.
        end: Offset in the file at which the frame ends.
    """

    kind: FrameKind
    payload: bytes
    end: int


def encode_frame(kind: FrameKind, payload: bytes) -> bytes:
    """Encodes a frame. O(payload)."""
    head = _HEAD.pack(len(payload), kind, crc32(payload))
    return b"".join((head, _CHECK.pack(crc32(head)), payload))


class FrameParser:
    """Takes the frames out of a stream of bytes.

    Args:
        max_payload_bytes: Maximum size of a payload.
    """

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.max_payload_bytes = max_payload_bytes
        self._buffer = bytearray()
        self._parsed_bytes = 0

    def feed(self, received: bytes) -> Generator[Frame, None, None]:
        """Takes bytes, and yields the frames that are complete with them. Keeps those that the caller does not take.

        Raises:
            DamageError: A frame is damaged or too large.
        """
        buffer, start = self._buffer, 0
        buffer += received
        try:
            while len(buffer) >= start + HEAD_BYTES:
                length, kind, checksum = _unpack_head(buffer, start, self._parsed_bytes + start, self.max_payload_bytes)
                end = start + HEAD_BYTES + length
                if len(buffer) < end:
                    return
                payload = bytes(memoryview(buffer)[start + HEAD_BYTES : end])
                start = end
                yield _checked(kind, payload, checksum, self._parsed_bytes + end)
        finally:
            del buffer[:start]
            self._parsed_bytes += start


def _unpack_head(buffer: bytes | bytearray, start: int, position: int, max_bytes: int) -> tuple[int, int, int]:
    """Returns the length, kind and checksum of a frame that begins at `start`; `position` names it in errors."""
    length, kind, checksum = _HEAD.unpack_from(buffer, start)
    (check,) = _CHECK.unpack_from(buffer, start + _HEAD.size)
    if check != crc32(memoryview(buffer)[start : start + _HEAD.size]) or length > max_bytes:
        raise DamageError(f"the frame at {position} has a damaged head")
    return length, kind, checksum


def _checked(kind: int, payload: bytes, checksum: int, end: int) -> Frame:
    position = end - len(payload) - HEAD_BYTES
    if crc32(payload) != checksum:
        raise DamageError(f"the frame at {position} has a damaged payload")
    try:
        return Frame(FrameKind(kind), payload, end)
    except ValueError:
        raise DamageError(f"the frame at {position} is of unknown kind {kind}") from None


class FrameReader:
    """Reads a file's frames one by one.

    Args:
        file: The file, positioned at its beginning.

    Attributes:
        is_torn: Whether the file ends within a frame; valid after `read` has returned None.
        end: Offset at which the last complete frame ends.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.is_torn = False
        self.end = 0

    def read_magic(self) -> bool:
        """Reads the magic number at the beginning; returns whether it is complete.

        Raises:
            DamageError: The file begins with other bytes.
        """
        found = self._file.read(len(MAGIC))
        if not MAGIC.startswith(found):
            raise DamageError("begins with other bytes")
        self.end = len(found)
        return not self._check_torn(found, len(MAGIC))

    def read(self) -> Frame | None:
        """Reads the next frame; None at the end of the file or at a torn frame.

        Raises:
            DamageError: The frame is damaged.
        """
        head = self._file.read(HEAD_BYTES)
        if not head or self._check_torn(head, HEAD_BYTES):
            return None
        length, kind, checksum = _unpack_head(head, 0, self.end, MAX_PAYLOAD_BYTES)
        payload = self._file.read(length)
        if self._check_torn(payload, length):
            return None
        frame = _checked(kind, payload, checksum, self.end + HEAD_BYTES + length)
        self.end = frame.end
        return frame

    def _check_torn(self, found: bytes, wanted: int) -> bool:
        self.is_torn = len(found) < wanted
        return self.is_torn
