"""Guards around RPC methods: they turn the core's errors into statuses, and wait for a method's turn."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from kvpool.core.errors import KvpoolError
from kvpool.wire.errors import internal_status, malformed_error, to_status

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
    await _end(context, rpc_status.to_status(internal_status()))


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
