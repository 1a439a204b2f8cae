"""Ends streams whose client takes nothing off, or says nothing: what waits for it is the server's memory."""

import asyncio
from math import inf
from types import TracebackType
from typing import Generic, Self, TypeVar

import grpc

from kvpool.core.errors import ExhaustedError, KvpoolError

NOT_READING_RETRY_SECONDS = 0.1

_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")


class Writer(Generic[_RequestT, _ResponseT]):
    """Writes the messages of a stream; belongs to the task that makes it. Closed by `with`.

    gRPC takes a message at once while the client reads, or little waits for it: at most one, and 64 KiB. One timer
    looks after all writes of a stream, as most of them take less time than to set one.

    Args:
        context: The stream's.
        stall_seconds: How long a message may wait.
    """

    __slots__ = ("_context", "_is_stalled", "_loop", "_since_seconds", "_stall_seconds", "_task", "_timer")

    def __init__(self, context: "grpc.aio.ServicerContext[_RequestT, _ResponseT]", stall_seconds: float) -> None:
        self._context = context
        self._stall_seconds = stall_seconds
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._since_seconds = inf  # of the message that waits
        self._is_stalled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer:
            self._timer.cancel()

    async def write(self, message: _ResponseT) -> None:
        """Writes a message.

        Raises:
            ExhaustedError: The client took nothing off for so long.
        """
        self._since_seconds = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._stall_seconds, self._look)
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if not self._is_stalled or self._task is None or self._task.uncancel():  # somebody else cancels, too
                raise
            text = f"nothing was read from this stream for {self._stall_seconds:g} s"
            raise ExhaustedError("NOT_READING", text, retry_seconds=NOT_READING_RETRY_SECONDS) from None
        except grpc.aio.BaseError:  # the client is gone: as if gRPC had cancelled the call a moment sooner
            raise asyncio.CancelledError from None
        finally:
            self._since_seconds = inf

    def _look(self) -> None:
        """Ends the write that waits if its time is up; looks again when that will be."""
        due_seconds = self._since_seconds + self._stall_seconds
        self._timer = None
        if self._loop.time() < due_seconds < inf:
            self._timer = self._loop.call_at(due_seconds, self._look)
        elif due_seconds < inf and self._task:
            self._is_stalled = True
            self._task.cancel()


async def read_first(
    context: grpc.aio.ServicerContext[_RequestT, _ResponseT], patience_seconds: float, silence: KvpoolError
) -> object:
    """Reads a stream's first message; raises `silence` if the client sends none for so long."""
    try:
        async with asyncio.timeout(patience_seconds):
            return await context.read()
    except TimeoutError:
        raise silence from None
