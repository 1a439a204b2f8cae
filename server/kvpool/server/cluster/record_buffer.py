"""The frames that a primary has sent in its term, as far as standbys may still need them."""

from collections import deque
from typing import Final

from kvpool.server.cluster.standbys import NOTHING
from kvpool.wire.frames import encode_frame
from kvpool.wire.link import Kind

MARK: Final = encode_frame(Kind.ANSWER, b"")
"""The frame of a position without a record."""


class RecordBuffer:
    """The newest frames of a term. Each has a position; the first one is 0.

    Args:
        max_bytes: Maximum size of the kept frames. A standby that needs an older one needs a snapshot.

    Attributes:
        last_position: Position of the newest frame.
    """

    def __init__(self, max_bytes: int) -> None:
        self.last_position = NOTHING
        self._max_bytes = max_bytes
        self._frames: deque[bytes] = deque()
        self._size_bytes = 0

    def append(self, frame: bytes) -> None:
        """Adds the frame of a record, or MARK."""
        self._frames.append(frame)
        self.last_position += 1
        self._size_bytes += len(frame)
        while self._size_bytes > self._max_bytes and len(self._frames) > 1:
            self._size_bytes -= len(self._frames.popleft())

    def after(self, position: int) -> list[bytes] | None:
        """The frames after a position; None if they are no longer kept, or the position does not exist."""
        count = self.last_position - position
        if not 0 <= count <= len(self._frames):
            return None
        return [self._frames[index] for index in range(len(self._frames) - count, len(self._frames))]
