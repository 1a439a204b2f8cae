"""Limits on streams: how many are open, and how long one may stall."""

import asyncio
import contextlib
from collections.abc import Iterator
from math import inf
from typing import Any, Final, Self, TypeAlias

import grpc

from kvpool.core.errors import ExhaustedError, KvpoolError
from kvpool.server.limits.config import RETRY_SECONDS

NOT_READING_RETRY_SECONDS: Final = 0.1

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class StreamSlots:
    """Limits the number of open streams of one kind. A stream can stay open indefinitely.

    Args:
        max_streams: Maximum number of open streams.
        reason: Reason of the error for one more stream.
        streams: Name of the streams in the error message.
    """

    def __init__(self, max_streams: int, reason: str, streams: str) -> None:
        self._max_streams = max_streams
        self._reason = reason
        self._streams = streams
        self._num_streams = 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Occupies a slot while a stream is open.

        Raises:
            ExhaustedError: All slots are occupied.
        """
        if self._num_streams >= self._max_streams:
            message = f"there are {self._num_streams} {self._streams}, the maximum"
            raise ExhaustedError(self._reason, message, retry_seconds=RETRY_SECONDS)
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1


class StreamWriter:
    """Writes the messages of a stream and ends the stream if the client does not read. Use with `with`.

    Unread messages occupy the server's memory. gRPC accepts a message immediately while the client reads or little is
    queued: at most one message, and 64 KiB. All writes of a stream share one timer, because most writes take less time
    than setting a timer. The writer belongs to the task that creates it.

    Args:
        context: The stream's context.
        stall_seconds: Maximum time for one write.
    """

    __slots__ = ("_context", "_is_stalled", "_loop", "_since_seconds", "_stall_seconds", "_task", "_timer")

    def __init__(self, context: Context, stall_seconds: float) -> None:
        self._context = context
        self._stall_seconds = stall_seconds
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._since_seconds = inf  # start of the pending write
        self._is_stalled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()

    async def write(self, message: object) -> None:
        """Writes a message.

        Raises:
            ExhaustedError: The client read nothing for `stall_seconds`.
        """
        self._since_seconds = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._stall_seconds, self._check_stall)
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if not self._is_stalled or self._task is None or self._task.uncancel():  # also cancelled by another task
                raise
            raise not_reading_error(self._stall_seconds) from None
        except grpc.aio.BaseError:  # the client disconnected: same effect as if gRPC had cancelled the call earlier
            raise asyncio.CancelledError from None
        finally:
            self._since_seconds = inf

    def _check_stall(self) -> None:
        """Cancels the pending write if it is overdue; otherwise sets the timer to when it would be."""
        due_seconds = self._since_seconds + self._stall_seconds
        self._timer = None
        if self._loop.time() < due_seconds < inf:
            self._timer = self._loop.call_at(due_seconds, self._check_stall)
        elif due_seconds < inf and self._task:
            self._is_stalled = True
            self._task.cancel()


def not_reading_error(stall_seconds: float) -> ExhaustedError:
    """Makes the error for a client that does not read."""
    text = f"nothing was read from this stream for {stall_seconds:g} s"
    return ExhaustedError("NOT_READING", text, retry_seconds=NOT_READING_RETRY_SECONDS)


async def read_first(context: Context, timeout_seconds: float, timeout_error: KvpoolError) -> object:
    """Reads a stream's first message. Raises `timeout_error` if the client sends none in time."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await context.read()
    except TimeoutError:
        raise timeout_error from None
