"""The state of a watch over several calls: how it continues after each kind of failure. Does no I/O.

1. Without a snapshot, a watch ends with the first failure.
2. With a snapshot, it continues with the next batch after a lost connection, if the server process is the same.
3. Where it cannot continue, it requests another snapshot: the batches are no longer kept, or the server restarted.
4. A pool that no longer exists has no cached blocks. It may come back, so the watch continues.
"""

from dataclasses import replace
from typing import Final

from kvpool.client.transports import messages
from kvpool.client.transports.transport import EventBatch, WatchKind, WatchOptions
from kvpool.core.errors import KvpoolError, NotFoundError, UnavailableError, WrongStateError
from kvpool.core.events import AllBlocksCleared
from kvpool.v1 import event_pb2
from kvpool.wire.backoff import Backoff

MAX_MISSED_HEARTBEATS: Final = 3
"""The connection counts as broken after this many heartbeats are missed in a row."""


class ResumableWatch:
    """State of one watch, over all its calls."""

    def __init__(self, options: WatchOptions) -> None:
        self._options = options
        self._is_whole = False
        self._has_begun = self._has_pool = False
        self._last = EventBatch(0)
        self._backoff = Backoff(0.05, 2.0)

    @property
    def silence_seconds(self) -> float | None:
        """Time without a message after which the call is cancelled; None for never."""
        if not self._options.snapshot:
            return None
        return self._options.heartbeat_seconds * MAX_MISSED_HEARTBEATS or None

    def request(self) -> event_pb2.WatchRequest:
        """Makes the next call's message."""
        request = messages.watch_request(self._options)
        if self._is_whole:
            request.snapshot = False
            request.from_sequence, request.boot_id = self._last.sequence + 1, self._last.boot_id
        return request

    def read(self, response: event_pb2.WatchResponse) -> EventBatch | None:
        """Reads a message; None for the first message of a call that does not begin with a snapshot."""
        batch = self._last = messages.read_batch(response)
        self._has_begun = self._has_pool = True
        if batch.kind is not WatchKind.START:
            self._backoff.reset()  # the call has made progress
        if batch.kind is WatchKind.SNAPSHOT_END:
            self._is_whole = True
        is_hidden = batch.kind is WatchKind.START and (self._is_whole or not self._options.snapshot)
        return None if is_hidden else batch

    def lost_pool(self, error: KvpoolError) -> EventBatch | None:
        """The batch that clears all blocks, once, if a call failed because the pool no longer exists."""
        if not (self._has_pool and isinstance(error, NotFoundError)):
            return None
        self._is_whole = self._has_pool = False
        return replace(self._last, kind=WatchKind.BATCH, events=(AllBlocksCleared(),))

    def pause_seconds(self, error: KvpoolError) -> float:
        """Returns the pause before the next call, after one that failed.

        Raises:
            KvpoolError: The error, if another call cannot succeed.
        """
        if not self._options.snapshot:
            raise error
        if isinstance(error, WrongStateError) and error.reason == "EVENTS_NOT_KEPT":
            self._is_whole = False
        elif not self._has_begun or not isinstance(error, UnavailableError | NotFoundError):
            raise error
        return self._backoff.next(error.retry_seconds or None)
