"""What the core refuses with. Each error carries a hint for a transport, and the core knows of none.

Rule 1: an error is raised before anything was changed.
Rule 2: the message is written for the caller and holds nothing of another session.
"""


class KvpoolError(Exception):
    """Base of everything that the core raises on purpose.

    Attributes:
        message: What is wrong, without the field's name.
        reason: An UPPER_SNAKE_CASE constant that programs may match on.
        field: The input at fault, as it is named on the wire; empty if none is.
        retry_seconds: When to try again; None if trying again is of no use.
    """

    def __init__(self, reason: str, message: str, *, field: str = "", retry_seconds: float | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_seconds = retry_seconds

    def rename_field(self, field: str) -> None:
        """Names the field as the caller knows it."""
        self.field = field
        self.args = (f"{field}: {self.message}" if field else self.message,)


class InvalidArgumentError(KvpoolError):
    """Malformed, out of range, or over a limit: the caller must fix `field`."""

    def __init__(self, field: str, message: str, *, reason: str = "INVALID_VALUE") -> None:
        super().__init__(reason, message, field=field)


class NotFoundError(KvpoolError):
    """An unknown pool, session or request: the caller must open it."""


class WrongStateError(KvpoolError):
    """Understood, but not in the state things are in: the caller waits, or fixes what `reason` tells."""


class AbortedError(KvpoolError):
    """The session was ended, by time, epoch or operator: the caller opens a new one and computes again."""


class UnavailableError(KvpoolError):
    """Draining: the caller tries again after `retry_seconds`."""


class ExhaustedError(KvpoolError):
    """Over a limit that protects others, such as a message's size: the caller sends less."""


class UnauthenticatedError(KvpoolError):
    """No token, or one that is unknown, has expired or was revoked: the caller needs another."""


class DeniedError(KvpoolError):
    """The caller is known, but this is not for it; says nothing of what there is."""


class IntegrityError(AssertionError):
    """The books do not balance: a bug in this package. Raised by checks that only tests and idle servers run."""


def check_range(field: str, value: int, low: int, high: int) -> int:
    """Returns `value` if it is in [low, high].

    Raises:
        InvalidArgumentError: It is not.
    """
    if not low <= value <= high:
        raise InvalidArgumentError(field, f"{value} is not in [{low}, {high}]")
    return value
