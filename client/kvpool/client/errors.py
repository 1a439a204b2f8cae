"""What a session's calls raise: the core's own errors, wherever the core runs, and what only a network can do."""

from collections.abc import Sequence
from typing import Final, cast

import grpc
from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2

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

__all__ = [
    "AbortedError",
    "DeadlineError",
    "DeniedError",
    "ExhaustedError",
    "InvalidArgumentError",
    "KvpoolError",
    "NotFoundError",
    "ServerError",
    "UnauthenticatedError",
    "UnavailableError",
    "WrongStateError",
    "from_rpc_error",
]

_DETAILS_KEY: Final = "grpc-status-details-bin"
_BROKEN_WRITE: Final = "Internal error from Core"
"""What grpc.aio calls a write on a stream whose connection has just broken; not what the server says."""


class DeadlineError(KvpoolError):
    """No answer came in time. The change may have been made: `Session.settle` finds out, or close the session."""


class ServerError(KvpoolError):
    """The server met a bug of its own, or is not a kvpool server."""


_ERRORS: Final[dict[grpc.StatusCode, type[KvpoolError]]] = {
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: WrongStateError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ExhaustedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: DeniedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
}


def from_rpc_error(error: grpc.RpcError) -> KvpoolError:
    """Makes the core's error again of what came over the wire, with reason, field and retry time."""
    code: grpc.StatusCode = error.code()
    text: str = error.details() or code.name
    reason, field, retry_seconds = code.name, "", None
    for detail in _details(error):
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
            reason, field = info.reason, info.metadata.get("field", "")
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    text = text.removeprefix(f"{field}: ")
    if code is grpc.StatusCode.INTERNAL and text == _BROKEN_WRITE:
        return UnavailableError("BROKEN", "the connection broke")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgumentError(field, text, reason=reason)
    return _ERRORS.get(code, ServerError)(reason, text, field=field, retry_seconds=retry_seconds)


def _details(error: grpc.RpcError) -> Sequence[any_pb2.Any]:
    encoded = b""
    for entry in error.trailing_metadata() or ():
        key, value = cast("tuple[str, bytes]", entry)
        if key == _DETAILS_KEY:
            encoded = value
    try:
        return tuple(status_pb2.Status.FromString(encoded).details)
    except message.DecodeError:
        return ()
