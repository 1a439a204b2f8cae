"""Frames on a stream of bytes: a head with length and kind, and a payload. No I/O.

1. Which frames may come next is a state. A frame changes it when its head has arrived, so that the maximum size of its
   payload is known before the payload is read.
2. A stream that was refused cannot continue: what follows is refused for the same head.
"""

import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.errors import ExhaustedError, InvalidArgumentError

HEAD: Final = struct.Struct("<IB")
"""Length of the payload in bytes, and kind."""


@dataclass(frozen=True, slots=True)
class State:
    """What may be received next.

    Attributes:
        name: What the stream is, for errors.
        after: By kind of frame: the maximum size of its payload in bytes, and the state after it.
    """

    name: str
    after: "Mapping[int, tuple[int, State]]" = field(default_factory=dict)


def encode_frame(kind: int, payload: bytes) -> bytes:
    """Encodes a frame. O(payload)."""
    return HEAD.pack(len(payload), kind) + payload


class FrameReader:
    """Takes the frames out of a stream.

    Args:
        state: The first state.

    Attributes:
        state: The state.
        torn: What was received of the next frame.
    """

    __slots__ = ("_head", "state", "torn")

    def __init__(self, state: State) -> None:
        self.state = state
        self.torn = bytearray()
        self._head: tuple[int, int] | None = None

    def feed(self, data: bytes, max_frames: int = sys.maxsize) -> list[tuple[int, bytes]]:
        """Takes received bytes. Returns kind and payload of the frames that are complete with them.

        Args:
            data: The bytes.
            max_frames: Maximum number of frames to return. Further ones wait for a call, which may bring no bytes.

        Raises:
            InvalidArgumentError: A frame of this kind may not come now (MALFORMED).
            ExhaustedError: A payload is too large (MESSAGE_TOO_LARGE). The frames before it are lost.
        """
        frames: list[tuple[int, bytes]] = []
        torn = self.torn
        torn += data
        while len(frames) < max_frames:
            if self._head is None:
                if len(torn) < HEAD.size:
                    return frames
                num_bytes, kind = HEAD.unpack_from(torn)
                found = self.state.after.get(kind)
                if found is None:
                    text = f"a frame of kind {kind} may not come while the link is {self.state.name}"
                    raise InvalidArgumentError("kind", text, reason="MALFORMED")
                if num_bytes > found[0]:
                    raise ExhaustedError("MESSAGE_TOO_LARGE", f"{num_bytes} bytes; the maximum is {found[0]}")
                self.state = found[1]
                self._head = num_bytes, kind
            num_bytes, kind = self._head
            end = HEAD.size + num_bytes
            if len(torn) < end:
                return frames
            frames.append((kind, bytes(torn[HEAD.size : end])))
            del torn[:end]
            self._head = None
        return frames
