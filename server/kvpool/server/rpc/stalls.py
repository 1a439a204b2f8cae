"""Ends streams whose client takes nothing off, or says nothing: what waits for it is the server's memory."""

import asyncio
from typing import TypeVar

import grpc

from kvpool.server.core.errors import ExhaustedError, KvpoolError

NOT_READING_RETRY_SECONDS = 0.1

_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")


async def write(
    context: grpc.aio.ServicerContext[_RequestT, _ResponseT], message: _ResponseT, stall_seconds: float
) -> None:
    """Writes a message of a stream.

    gRPC takes it at once while the client reads, or little waits for it: at most one message, and 64 KiB.

    Raises:
        ExhaustedError: The client took nothing off for so long.
    """
    try:
        async with asyncio.timeout(stall_seconds):
            await context.write(message)
    except TimeoutError:
        text = f"nothing was read from this stream for {stall_seconds:g} s"
        raise ExhaustedError("NOT_READING", text, retry_seconds=NOT_READING_RETRY_SECONDS) from None
    except grpc.aio.BaseError:  # the client is gone: as if gRPC had cancelled the call a moment sooner
        raise asyncio.CancelledError from None


async def read_first(
    context: grpc.aio.ServicerContext[_RequestT, _ResponseT], patience_seconds: float, silence: KvpoolError
) -> object:
    """Reads a stream's first message; raises `silence` if the client sends none for so long."""
    try:
        async with asyncio.timeout(patience_seconds):
            return await context.read()
    except TimeoutError:
        raise silence from None
