"""The errors that a session's calls raise: the core's errors, wherever the core runs, and those of the network."""

from kvpool.core.errors import (
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
from kvpool.wire.errors import DeadlineError, ServerError

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
]
