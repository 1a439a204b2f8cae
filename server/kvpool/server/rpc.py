"""Shared code of gRPC methods: errors as statuses, interceptors, and handlers taken apart and rebuilt."""

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from kvpool.core.errors import KvpoolError, out_of_memory
from kvpool.wire.errors import internal_status, malformed_error, to_status

Behavior = Callable[[Any, Any], Awaitable[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_HANDLER_FACTORIES: Final[dict[str, "Callable[..., Handler]"]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}
_ABORT_TIMEOUT_SECONDS: Final = 1.0
"""Maximum time to wait until gRPC has accepted a status."""

_log = logging.getLogger("kvpool.server")


def method_of(details: grpc.HandlerCallDetails) -> str:
    """The full name of the called method, without the leading slash that it has on the wire."""
    return str(details.method).removeprefix("/")


def behavior_of(handler: "Handler") -> Any:  # noqa: ANN401 - of one of four kinds
    """The function that a handler calls."""
    return getattr(handler, _kind(handler))


def rewrapped(
    handler: "Handler", behavior: Callable[[Any, Any], object], parser: Callable[[bytes], Any] | None = None
) -> "Handler":
    """Returns a handler of the same kind that calls `behavior` instead, and parses requests with `parser` if given."""
    parser = parser or handler.request_deserializer
    return _HANDLER_FACTORIES[_kind(handler)](behavior, parser, handler.response_serializer)


def _kind(handler: "Handler") -> str:
    return next(kind for kind in _HANDLER_FACTORIES if getattr(handler, kind, None) is not None)


async def abort(context: Context, error: KvpoolError, method: str) -> NoReturn:
    """Ends a call with the status of a core error. A client can cause many, so the log level is debug."""
    _log.debug("call refused", extra={"method": method, "reason": error.reason, "error": str(error)})
    await _end(context, rpc_status.to_status(to_status(error)))


async def abort_internal(context: Context, method: str) -> NoReturn:
    """Ends a call that hit a bug. Logs the exception being handled; the client receives no details of it."""
    _log.exception("bug", extra={"method": method})
    await _end(context, rpc_status.to_status(internal_status()))


async def abort_with(context: Context, error: Exception, method: str) -> NoReturn:
    """Ends a call with the status of an exception that is being handled.

    A stream message that cannot be parsed is the client's fault. For calls with a single request, `RequestReader`
    handles that case.
    """
    match error:
        case KvpoolError():
            await abort(context, error, method)
        case DecodeError():
            await abort(context, malformed_error(), method)
        case MemoryError():  # before a change, or after it: then its retry gets the result
            await abort(context, out_of_memory(), method)
        case _:
            await abort_internal(context, method)


async def _end(context: Context, status: grpc.Status) -> NoReturn:
    """Ends a call with a status.

    gRPC queues the status behind the messages that the client has not read. It keeps both until the client reads them
    or the connection ends, so this function does not wait for that. If the call has already ended, there is no client
    to send the status to, and gRPC would log an error.
    """
    passes = getattr(context, "passes", None)
    if passes:  # a server of a shard: see `GateInterceptor`
        await passes()
    try:
        async with asyncio.timeout(_ABORT_TIMEOUT_SECONDS):
            await context.abort(status.code, status.details, status.trailing_metadata)
    except (TimeoutError, grpc.aio.InternalError):
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")


@contextlib.asynccontextmanager
async def errors_sent(context: Context, method: str) -> AsyncIterator[None]:
    """Ends a call with the status of an exception raised in the block. For methods that wait."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the boundary: a bug must end this call alone, and is logged
        await abort_with(context, error, method)


class Interceptor(grpc.aio.ServerInterceptor):
    """An interceptor that wraps the handlers of existing methods."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Returns the handler of a call; None if there is no such method."""
        handler = await continuation(handler_call_details)
        return self.wrap(handler, handler_call_details) if handler else None

    @abstractmethod
    def wrap(self, handler: "Handler", details: grpc.HandlerCallDetails) -> "Handler":
        """Returns the handler that serves a call instead of the method's own."""
