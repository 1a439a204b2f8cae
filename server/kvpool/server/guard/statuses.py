"""Ends calls with the status of an error."""

import asyncio
import logging
from typing import Final, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from kvpool.core.errors import KvpoolError, out_of_memory
from kvpool.server.limits.streams import Context
from kvpool.wire.errors import internal_status, malformed_error, to_status

_ABORT_TIMEOUT_SECONDS: Final = 1.0
"""Maximum time to wait until gRPC has accepted a status."""

_log = logging.getLogger("kvpool.server")


async def abort_with(context: Context, error: Exception, method: str) -> NoReturn:
    """Ends a call with the status of an exception that is being handled.

    A message that cannot be parsed is the client's fault. A bug is logged, and the client receives no details of it.
    """
    match error:
        case KvpoolError():
            await abort(context, error, method)
        case DecodeError():
            await abort(context, malformed_error(), method)
        case MemoryError():  # before a change, or after it: then its retry gets the result
            await abort(context, out_of_memory(), method)
        case _:
            _log.exception("bug", extra={"method": method})
            await _end(context, rpc_status.to_status(internal_status()))


async def abort(context: Context, error: KvpoolError, method: str) -> NoReturn:
    """Ends a call with the status of a core error. A client can cause many, so the log level is debug."""
    _log.debug("call refused", extra={"method": method, "reason": error.reason, "error": str(error)})
    await _end(context, rpc_status.to_status(to_status(error)))


async def _end(context: Context, status: grpc.Status) -> NoReturn:
    """Ends a call with a status.

    gRPC queues the status behind the messages that the client has not read. It keeps both until the client reads them
    or the connection ends, so this function does not wait for that. If the call has already ended, there is no client
    to send the status to, and gRPC would log an error.
    """
    passes = getattr(context, "passes", None)
    if passes:  # a server of a shard: see `GatedContext`
        await passes()
    try:
        async with asyncio.timeout(_ABORT_TIMEOUT_SECONDS):
            await context.abort(status.code, status.details, status.trailing_metadata)
    except (TimeoutError, grpc.aio.InternalError):
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")
