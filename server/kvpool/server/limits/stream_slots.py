"""How many streams of a kind are open at a time."""

import contextlib
from collections.abc import Iterator

from kvpool.core.errors import ExhaustedError
from kvpool.server.limits.config import RETRY_SECONDS


class Room:
    """Room for so many streams, each of which may stay for ever.

    Args:
        max_streams: Most at a time.
        reason: What one more is refused with.
        streams: What they are called.
    """

    def __init__(self, max_streams: int, reason: str, streams: str) -> None:
        self._max_streams = max_streams
        self._reason = reason
        self._streams = streams
        self._num_streams = 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Counts a stream while it is open.

        Raises:
            ExhaustedError: It is one too many.
        """
        if self._num_streams >= self._max_streams:
            message = f"there are {self._num_streams} {self._streams}, as many as may be"
            raise ExhaustedError(self._reason, message, retry_seconds=RETRY_SECONDS)
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1
