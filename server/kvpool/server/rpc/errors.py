"""The one table from the core's errors to status codes, and how an error is sent."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvpool.server.core.errors import (
    AbortedError,
    DeniedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)

DOMAIN: Final = "kvpool"

CODES: Final[dict[type[KvpoolError], grpc.StatusCode]] = {
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    WrongStateError: grpc.StatusCode.FAILED_PRECONDITION,
    AbortedError: grpc.StatusCode.ABORTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    ExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    DeniedError: grpc.StatusCode.PERMISSION_DENIED,
}

_TOLD_SECONDS: Final = 1.0
"""How long a status may take to leave."""

_log = logging.getLogger("kvpool.server")

_ServicerT = TypeVar("_ServicerT")
_TurnsT = TypeVar("_TurnsT", bound="TakesTurns[Any]")
_RequestT = TypeVar("_RequestT")
_RequestT_contra = TypeVar("_RequestT_contra", contravariant=True)
_ResponseT = TypeVar("_ResponseT")
_Context = grpc.aio.ServicerContext[_RequestT, _ResponseT]
_Method = Callable[[_ServicerT, _RequestT, _Context[_RequestT, _ResponseT]], Awaitable[_ResponseT]]


def to_status(error: KvpoolError) -> status_pb2.Status:
    """Writes an error as google.rpc.Status: ErrorInfo always; BadRequest and RetryInfo where they say something."""
    details: list[object] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=DOMAIN, metadata={"field": error.field} if error.field else {}
        )
    ]
    if isinstance(error, InvalidArgumentError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code = next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
    status = status_pb2.Status(code=code.value[0], message=str(error))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)  # type: ignore[arg-type]
        status.details.append(packed)
    return status


async def abort(context: _Context[_RequestT, _ResponseT], error: KvpoolError, method: str) -> NoReturn:
    """Ends a call with an error of the core's. Clients may do that to us often: the log says it at debug only."""
    _log.debug("call refused", extra={"method": method, "reason": error.reason, "error": str(error)})
    await _end(context, rpc_status.to_status(to_status(error)))


async def _end(context: _Context[_RequestT, _ResponseT], status: grpc.Status) -> NoReturn:
    """Ends a call with a status.

    That stands behind the messages which the client has not read. gRPC keeps it, and the one that it was sending, until
    the client comes to it or its connection ends; nothing of ours waits for that. A call that has just ended by itself
    has nobody to tell; gRPC would log an error.
    """
    try:
        async with asyncio.timeout(_TOLD_SECONDS):
            await context.abort(status.code, status.details, status.trailing_metadata)
    except (TimeoutError, grpc.aio.InternalError):
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")


async def abort_internal(context: _Context[_RequestT, _ResponseT], method: str) -> NoReturn:
    """Ends a call that met a bug of ours: logs the exception being handled, and tells the caller nothing of it."""
    _log.exception("bug", extra={"method": method})
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN)
    status = status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0], message="internal error; see the server's log")
    packed = any_pb2.Any()
    packed.Pack(info)
    status.details.append(packed)
    await _end(context, rpc_status.to_status(status))


def malformed_error() -> InvalidArgumentError:
    """What a message that cannot be parsed is answered with."""
    return InvalidArgumentError("message", "cannot be parsed", reason="MALFORMED")


@contextlib.asynccontextmanager
async def errors_sent(context: _Context[_RequestT, _ResponseT], method: str) -> AsyncIterator[None]:
    """Ends a call that waits with what is raised within, as the table says.

    A message of a stream that is no message at all is the client's fault; of a call of one request `tolerance` says so.
    """
    try:
        yield
    except KvpoolError as error:
        await abort(context, error, method)
    except DecodeError:
        await abort(context, malformed_error(), method)
    except Exception:  # noqa: BLE001 - the boundary: a bug must end this call alone, and is logged
        await abort_internal(context, method)


class TakesTurns(Protocol[_RequestT_contra]):
    """A service of which some methods take their turn with those of others."""

    async def take_turn(self, request: _RequestT_contra, /) -> None:
        """Waits for the turn of who sent a request."""

    def end_turn(self) -> None:
        """Ends it."""


def in_turn(method: Callable[[_TurnsT, _RequestT], _ResponseT]) -> _Method[_TurnsT, _RequestT, _ResponseT]:
    """As `guarded`, of a method that changes something or looks at much: it waits for its turn first."""

    @functools.wraps(method)
    async def call(self: _TurnsT, request: _RequestT, context: _Context[_RequestT, _ResponseT]) -> _ResponseT:
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
    """Makes an RPC of a plain method: request in, response out, errors sent as the table says.

    The method has no `await`, so nothing stands between its check and its change.
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
