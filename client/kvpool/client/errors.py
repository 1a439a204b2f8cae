"""The errors of a client: those of the core, wherever it runs, and those of the network."""

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
