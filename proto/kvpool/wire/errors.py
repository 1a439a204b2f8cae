"""The table of core errors and gRPC status codes, and the conversions in both directions."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2

from kvpool.core.errors import (
    AbortedError,
    DeniedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    NotPrimaryError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from kvpool.wire.unreachable import explained, is_connecting

DOMAIN: Final = "kvpool"
_DETAILS_KEY: Final = "grpc-status-details-bin"
_NOT_PRIMARY: Final = "NOT_PRIMARY"
_PRIMARY: Final = "primary"
_TERM: Final = "term"
_TERM_DIGITS: Final = re.compile("[0-9]{1,19}")
_NO_ANSWER: Final = "no answer in time"
_BROKEN_WRITE: Final = "Internal error from Core"
"""Message of grpc.aio for a write on a stream whose connection has just broken. The server never sends it."""


class DeadlineError(KvpoolError):
    """No response arrived in time. The change may have been made: call `Session.settle`, or close the session."""


class ServerError(KvpoolError):
    """The server hit a bug, or is not a kvpool server."""


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
"""The status code of each error that a server sends. A client uses the reverse table.

A subclass has the code of its base class; NOT_PRIMARY tells `NotPrimaryError` from its base.
"""

_ERRORS: Final[dict[grpc.StatusCode, type[KvpoolError]]] = {
    **{code: error for error, code in CODES.items()},
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: UnavailableError,  # gRPC's answer for a call that outlasts the grace time of a stop
}


def to_status(error: KvpoolError) -> status_pb2.Status:
    """Encodes an error as google.rpc.Status with ErrorInfo and, where they apply, BadRequest and RetryInfo."""
    metadata = {"field": error.field} if error.field else {}
    if isinstance(error, NotPrimaryError):
        metadata |= {_PRIMARY: ",".join(error.addresses), _TERM: str(error.term)}
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    ]
    if isinstance(error, InvalidArgumentError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code = next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
    return _status(code, str(error), details)


def internal_status() -> status_pb2.Status:
    """Makes the status of a call that hit a bug of the server. It contains no details of the bug."""
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN)
    return _status(grpc.StatusCode.INTERNAL, "internal error; see the server's log", [info])


def malformed_error() -> InvalidArgumentError:
    """Makes the error for a message that cannot be parsed."""
    return InvalidArgumentError("message", "cannot be parsed", reason="MALFORMED")


def not_sent_error(reason: str, message: str) -> UnavailableError:
    """Makes the error of a call that no server can have read, as there was no connection."""
    error = UnavailableError(reason, message)
    error.was_sent = False
    return error


def from_rpc_error(error: grpc.RpcError, address: str = "", token_source: str = "") -> KvpoolError:
    """Decodes a gRPC error into the core error, with reason, field and retry time.

    Args:
        error: The error of a call.
        address: Address of the server, for errors that no kvpool server has sent.
        token_source: Where the client has its token from, for errors about the token.
    """
    return _error(error.code(), error.details() or "", _details(error), address, token_source)


def from_status(status: status_pb2.Status, address: str = "", token_source: str = "") -> KvpoolError:
    """Decodes what `to_status` encoded. See `from_rpc_error` for the other arguments."""
    codes = {code.value[0]: code for code in grpc.StatusCode}
    code = codes.get(status.code, grpc.StatusCode.UNKNOWN)
    return _error(code, status.message, status.details, address, token_source)


def _error(
    code: grpc.StatusCode, text: str, details: Iterable[any_pb2.Any], address: str = "", token_source: str = ""
) -> KvpoolError:
    text = text or code.name
    reason, field, retry_seconds = code.name, "", None
    for detail in details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
            reason, field = info.reason, info.metadata.get("field", "")
            if code is grpc.StatusCode.UNAVAILABLE and reason == _NOT_PRIMARY:
                return _not_primary(info.metadata, text)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    text = text.removeprefix(f"{field}: ")
    if code is grpc.StatusCode.INTERNAL and text == _BROKEN_WRITE:
        return UnavailableError("BROKEN", "the connection broke")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgumentError(field, text, reason=reason)
    if code is grpc.StatusCode.UNAUTHENTICATED and token_source:
        text = f"{address}: {text}; {token_source}"
    elif code is grpc.StatusCode.UNAVAILABLE and reason == code.name and is_connecting(text):
        return not_sent_error(reason, f"{address}: {explained(text)}" if address else text)
    elif reason == code.name and address:
        text = f"{address}: {_NO_ANSWER if code is grpc.StatusCode.DEADLINE_EXCEEDED else explained(text)}"
    return _ERRORS.get(code, ServerError)(reason, text, field=field, retry_seconds=retry_seconds)


def _not_primary(metadata: Mapping[str, str], text: str) -> NotPrimaryError:
    """Decodes the metadata of a refusal. What is malformed counts as not known."""
    addresses = tuple(filter(None, metadata.get(_PRIMARY, "").split(",")))
    term = metadata.get(_TERM, "")
    return NotPrimaryError(addresses, int(term) if _TERM_DIGITS.fullmatch(term) else 0, text)


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


def _status(code: grpc.StatusCode, text: str, details: Sequence[message.Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=text)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status
