"""Frames in a file: what is written in one piece, and how far a file that was being written can be trusted.

1. A frame is a head (length, kind, checksum of the payload, checksum of these) and a payload.
2. Files only grow, frame by frame, until the process that writes them dies: then the last frame may be cut short. That
   one is *torn*: nobody was answered yet. Whatever else is wrong, whole frames included whose checksum is, is damage.
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


class FrameKind(IntEnum):
    """What a payload is."""

    HEADER = 1
    """Of which file this is; the first frame of each."""
    STEP = 2
    """A step of a session, or a unary call as one."""
    CALL = 3
    """Any other change."""
    GRAPH = 4
    """A snapshot: all but requests and the columns by block."""
    SLICE = 5
    """A snapshot: a piece of a column."""
    END = 6
    """A snapshot: it is whole."""
    POOLS = 7
    """Names, configurations and epochs of the pools."""
    REQUESTS = 8
    """A snapshot: some of the sessions' requests."""


class DamageError(Exception):
    """A file holds what was never written so."""


NONSENSE: Final = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What comes of taking apart a payload that is whole and was never written so."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame as it was read.

    Attributes:
        kind: What the payload is.
        payload: What was written.
        end: Where in the file it ends.
    """

    kind: FrameKind
    payload: bytes
    end: int


def encode_frame(kind: FrameKind, payload: bytes) -> bytes:
    """Makes the bytes of a frame. O(payload)."""
    head = _HEAD.pack(len(payload), kind, crc32(payload))
    return b"".join((head, _CHECK.pack(crc32(head)), payload))


class FrameReader:
    """Reads a file's frames one by one.

    Args:
        file: The file, at its beginning.

    Attributes:
        is_torn: Whether the file ends within a frame; known once `read` has returned None.
        end: Where the last whole frame ends.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.is_torn = False
        self.end = 0

    def read_magic(self) -> bool:
        """Reads how each file begins; returns whether all of it is there.

        Raises:
            DamageError: It begins otherwise.
        """
        found = self._file.read(len(MAGIC))
        if not MAGIC.startswith(found):
            raise DamageError("begins with other bytes")
        self.end = len(found)
        return not self._tears(found, len(MAGIC))

    def read(self) -> Frame | None:
        """Reads the next frame; None at the end.

        Raises:
            DamageError: It is not as it was written.
        """
        head = self._file.read(HEAD_BYTES)
        if not head or self._tears(head, HEAD_BYTES):
            return None
        length, kind, checksum = _HEAD.unpack_from(head)
        if _CHECK.unpack_from(head, _HEAD.size)[0] != crc32(head[: _HEAD.size]) or length > MAX_PAYLOAD_BYTES:
            raise DamageError(f"the frame at {self.end} has a damaged head")
        payload = self._file.read(length)
        if self._tears(payload, length):
            return None
        if crc32(payload) != checksum:
            raise DamageError(f"the frame at {self.end} has a damaged payload")
        try:
            known = FrameKind(kind)
        except ValueError:
            raise DamageError(f"the frame at {self.end} is of unknown kind {kind}") from None
        self.end += HEAD_BYTES + length
        return Frame(known, payload, self.end)

    def _tears(self, found: bytes, wanted: int) -> bool:
        self.is_torn = len(found) < wanted
        return self.is_torn
