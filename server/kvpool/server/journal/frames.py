"""Frames of a journal's files. Standbys receive records and snapshots as these frames, too.

1. A frame is a head (length, kind, checksum of the payload, checksum of these three) and a payload.
2. Files grow frame by frame until the writing process dies. Then the last frame may be incomplete (*torn*): its change
   was not answered yet. Everything else is damage, including complete frames with a wrong checksum.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO, Final
from zlib import crc32

from kvpool.server.codec import DamageError

_HEAD: Final = struct.Struct("<IBI")
_CHECK: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _CHECK.size
DAMAGE: Final = bytes(HEAD_BYTES)
"""No head of a frame. A file that begins or ends with it is damaged."""
_READ_BYTES: Final = 2**20


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


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that was read.

    Attributes:
        kind: Kind of the payload.
        encoded: The whole frame, as it was written.
    """

    kind: FrameKind
    encoded: bytes

    @property
    def payload(self) -> bytes:
        """The content. O(payload)."""
        return self.encoded[HEAD_BYTES:]


def encode_frame(kind: FrameKind, payload: bytes) -> bytes:
    """Encodes a frame. O(payload)."""
    head = _HEAD.pack(len(payload), kind, crc32(payload))
    return b"".join((head, _CHECK.pack(crc32(head)), payload))


def decode_frame(encoded: bytes) -> Frame:
    """Decodes exactly one frame. O(payload).

    Raises:
        DamageError: It is damaged, or these are not the bytes of one frame.
    """
    num_bytes, kind, checksum = _head_of(encoded)
    if len(encoded) != num_bytes:
        raise DamageError(f"{len(encoded)} bytes instead of {num_bytes}")
    if crc32(memoryview(encoded)[HEAD_BYTES:]) != checksum:
        raise DamageError("a damaged payload")
    try:
        return Frame(FrameKind(kind), encoded)
    except ValueError:
        raise DamageError(f"the unknown kind {kind}") from None


def _head_of(encoded: bytes | bytearray) -> tuple[int, int, int]:
    """Size of a frame in bytes, kind, and checksum of the payload."""
    if len(encoded) < HEAD_BYTES or _CHECK.unpack_from(encoded, _HEAD.size)[0] != crc32(encoded[: _HEAD.size]):
        raise DamageError("a damaged head")
    length, kind, checksum = _HEAD.unpack_from(encoded)
    return HEAD_BYTES + length, kind, checksum


class FrameParser:
    """Takes the frames out of a stream of bytes, or of a file.

    Attributes:
        end: Position at which the last frame that was taken ends.
    """

    def __init__(self) -> None:
        self.end = 0
        self._buffer = bytearray()

    @property
    def is_torn(self) -> bool:
        """Whether bytes came after the last frame that was taken."""
        return bool(self._buffer)

    def feed(self, received: bytes) -> Iterator[Frame]:
        """Takes bytes, and yields the frames that are complete with them. Keeps those that the caller does not take.

        Raises:
            DamageError: A frame is damaged.
        """
        self._buffer += received
        while frame := self._take():
            yield frame

    def read(self, file: BinaryIO) -> Iterator[Frame]:
        """Yields the frames of a file. At its end `is_torn` says whether the last one is incomplete.

        Raises:
            DamageError: A frame is damaged.
            OSError: The file cannot be read.
        """
        while received := file.read(_READ_BYTES):
            yield from self.feed(received)

    def _take(self) -> Frame | None:
        buffer = self._buffer
        if len(buffer) < HEAD_BYTES:
            return None
        try:
            num_bytes = _head_of(buffer)[0]
            if len(buffer) < num_bytes:
                return None
            frame = decode_frame(bytes(buffer[:num_bytes]))
        except DamageError as error:
            raise DamageError(f"the frame at {self.end} has {error}") from None
        del buffer[:num_bytes]
        self.end += num_bytes
        return frame
