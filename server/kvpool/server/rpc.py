"""Shared code of gRPC methods: handlers taken apart and rebuilt, and wrappers that turn errors into statuses."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from kvpool.core.errors import KvpoolError
from kvpool.wire.errors import internal_status, malformed_error, to_status

Behavior = Callable[[Any, Any], Awaitable[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_HANDLER_FACTORIES: Final[dict[str, "Callable[..., Handler]"]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}
_ABORT_TIMEOUT_SECONDS: Final = 1.0
"""Maximum time to wait until gRPC has accepted a status."""

_log = logging.getLogger("kvpool.server")

_ServicerT = TypeVar("_ServicerT")
_FairServicerT = TypeVar("_FairServicerT", bound="FairServicer[Any]")
_RequestT = TypeVar("_RequestT")
_RequestT_contra = TypeVar("_RequestT_contra", contravariant=True)
_ResponseT = TypeVar("_ResponseT")
_Context = grpc.aio.ServicerContext[_RequestT, _ResponseT]
_Method = Callable[[_ServicerT, _RequestT, _Context[_RequestT, _ResponseT]], Awaitable[_ResponseT]]


def method_of(details: grpc.HandlerCallDetails) -> str:
    """The full name of the called method, without the leading slash that it has on the wire."""
    return str(details.method).removeprefix("/")


def behavior_of(handler: "Handler") -> Any:  # noqa: ANN401 - of one of four kinds
    """The function that a handler calls."""
    return getattr(handler, _kind(handler))


def rewrapped(handler: "Handler", behavior: Callable[[Any, Any], object]) -> "Handler":
    """Returns a handler of the same kind that calls `behavior` instead."""
    return _HANDLER_FACTORIES[_kind(handler)](behavior, handler.request_deserializer, handler.response_serializer)


def _kind(handler: "Handler") -> str:
    return next(kind for kind in _HANDLER_FACTORIES if getattr(handler, kind, None) is not None)


async def abort(context: _Context[_RequestT, _ResponseT], error: KvpoolError, method: str) -> NoReturn:
    """Ends a call with the status of a core error. A client can cause many, so the log level is debug."""
    _log.debug("call refused", extra={"method": method, "reason": error.reason, "error": str(error)})
    await _end(context, rpc_status.to_status(to_status(error)))


async def abort_internal(context: _Context[_RequestT, _ResponseT], method: str) -> NoReturn:
    """Ends a call that hit a bug. Logs the exception being handled; the client receives no details of it."""
    _log.exception("bug", extra={"method": method})
    await _end(context, rpc_status.to_status(internal_status()))


async def _end(context: _Context[_RequestT, _ResponseT], status: grpc.Status) -> NoReturn:
    """Ends a call with a status.

    gRPC queues the status behind the messages that the client has not read. It keeps both until the client reads them
    or the connection ends, so this function does not wait for that. If the call has already ended, there is no client
    to send the status to, and gRPC would log an error.
    """
    try:
        async with asyncio.timeout(_ABORT_TIMEOUT_SECONDS):
            await context.abort(status.code, status.details, status.trailing_metadata)
    except (TimeoutError, grpc.aio.InternalError):
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")


@contextlib.asynccontextmanager
async def errors_sent(context: _Context[_RequestT, _ResponseT], method: str) -> AsyncIterator[None]:
    """Ends a call with the status of an exception raised in the block. For methods that wait.

    A stream message that cannot be parsed is the client's fault. For calls with a single request, `RequestReader`
    handles that case.
    """
    try:
        yield
    except KvpoolError as error:
        await abort(context, error, method)
    except DecodeError:
        await abort(context, malformed_error(), method)
    except Exception:  # noqa: BLE001 - the boundary: a bug must end this call alone, and is logged
        await abort_internal(context, method)


class FairServicer(Protocol[_RequestT_contra]):
    """A service whose methods take fair turns; see `FairTurns`."""

    async def take_turn(self, request: _RequestT_contra, /) -> None:
        """Waits for the turn of the session that a request belongs to."""

    def end_turn(self) -> None:
        """Ends the turn."""


def in_turn(
    method: Callable[[_FairServicerT, _RequestT], _ResponseT],
) -> _Method[_FairServicerT, _RequestT, _ResponseT]:
    """Like `guarded`, for a method that changes state or reads much of it: it waits for its turn first."""

    @functools.wraps(method)
    async def call(self: _FairServicerT, request: _RequestT, context: _Context[_RequestT, _ResponseT]) -> _ResponseT:
        try:
            await self.take_turn(request)
            try:
                return method(self, request)
            finally:
                self.end_turn()
        except KvpoolError as error:
            await abort(context, error, method.__name__)
        except Exception:  # noqa: BLE001 - the boundary: a bug must end this call alone, and is logged
            await abort_internal(context, method.__name__)

    return call


def guarded(method: Callable[[_ServicerT, _RequestT], _ResponseT]) -> _Method[_ServicerT, _RequestT, _ResponseT]:
    """Makes an RPC of a plain method that takes the request and returns the response. Errors become statuses.

    The method has no `await`, so nothing runs between its check and its change.
    """

    @functools.wraps(method)
    async def call(self: _ServicerT, request: _RequestT, context: _Context[_RequestT, _ResponseT]) -> _ResponseT:
        try:
            return method(self, request)
        except KvpoolError as error:
            await abort(context, error, method.__name__)
        except Exception:  # noqa: BLE001 - the boundary: a bug must end this call alone, and is logged
            await abort_internal(context, method.__name__)

    return call
