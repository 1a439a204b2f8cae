"""Frames of a journal's files.

1. A frame is a head (length, kind, checksum of the payload, checksum of these three) and a payload.
2. Files grow frame by frame until the writing process dies. Then the last frame may be incomplete (*torn*): its change
   was not answered yet. Everything else is damage, including complete frames with a wrong checksum.
"""

import struct
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
        length, kind, checksum = _HEAD.unpack_from(head)
        if _CHECK.unpack_from(head, _HEAD.size)[0] != crc32(head[: _HEAD.size]) or length > MAX_PAYLOAD_BYTES:
            raise DamageError(f"the frame at {self.end} has a damaged head")
        payload = self._file.read(length)
        if self._check_torn(payload, length):
            return None
        if crc32(payload) != checksum:
            raise DamageError(f"the frame at {self.end} has a damaged payload")
        try:
            known = FrameKind(kind)
        except ValueError:
            raise DamageError(f"the frame at {self.end} is of unknown kind {kind}") from None
        self.end += HEAD_BYTES + length
        return Frame(known, payload, self.end)

    def _check_torn(self, found: bytes, wanted: int) -> bool:
        self.is_torn = len(found) < wanted
        return self.is_torn
