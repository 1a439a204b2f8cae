"""A watch that begins with a snapshot and never ends: how it goes on after each kind of failure. Does no I/O.

1. What was whole stays whole over a lost connection: the watch goes on with the next batch, of the same boot only.
2. Where it cannot go on, another snapshot is asked for: batches are no longer kept, or the server is another one.
"""

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Final

from kvpool.client.errors import KvpoolError, NotFoundError, UnavailableError, WrongStateError
from kvpool.client.transports import messages
from kvpool.client.transports.embedded import EventBatch, WatchKind, WatchOptions
from kvpool.v1 import event_pb2

SILENT_HEARTBEATS: Final = 3
"""After so many heartbeats that did not come the connection counts as broken."""


class ResumableWatch:
    """State of one such watch, over as many calls as it takes."""

    def __init__(self, options: WatchOptions) -> None:
        self._options = options
        self._is_whole = False
        self._has_begun = False
        self._last = EventBatch(0)
        self._pauses = _pauses()

    @property
    def silence_seconds(self) -> float | None:
        """After how long without a message the call is to be given up; None for never."""
        return self._options.heartbeat_seconds * SILENT_HEARTBEATS or None

    def silent(self) -> UnavailableError:
        """What a call failed with that was given up."""
        return UnavailableError("SILENT", f"nothing was heard for {self.silence_seconds} s")

    def request(self) -> event_pb2.WatchRequest:
        """Makes the next call's message."""
        request = messages.watch_request(self._options)
        if self._is_whole:
            request.snapshot = False
            request.from_sequence, request.boot_id = self._last.sequence + 1, self._last.boot_id
        return request

    def read(self, response: event_pb2.WatchResponse) -> EventBatch | None:
        """Reads a message; None if it tells nothing, as where a watch goes on."""
        batch = self._last = messages.read_batch(response)
        self._has_begun = True
        if batch.kind is not WatchKind.START:
            self._pauses = _pauses()  # it got somewhere
        if batch.kind is WatchKind.SNAPSHOT_END:
            self._is_whole = True
        return None if batch.kind is WatchKind.START and self._is_whole else batch

    def pause_seconds(self, error: KvpoolError) -> float:
        """Says how long to wait before the next call, after one that failed.

        Raises:
            KvpoolError: The error, if another call would not help.
        """
        if isinstance(error, WrongStateError) and error.reason == "EVENTS_NOT_KEPT":
            self._is_whole = False
        elif not self._has_begun or not isinstance(error, UnavailableError | NotFoundError):
            raise error
        return error.retry_seconds or next(self._pauses)


def _pauses() -> Iterator[float]:
    return chain(messages.REOPEN_PAUSES_SECONDS, repeat(messages.REOPEN_PAUSES_SECONDS[-1]))
