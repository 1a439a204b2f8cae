"""The caller of the current call, and checks of its permissions.

1. The caller is a context variable of the call's task. Without tokens there is no caller, and everything is allowed.
2. Refusals do not reveal whether a pool exists.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, NoReturn

from kvpool.core.errors import DeniedError, KvpoolError
from kvpool.core.state import State
from kvpool.server.auth.tokens import Grant, Role


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a token.

    Attributes:
        grant: Permissions of the token.
        on_refused: Called with each refusal.
    """

    grant: Grant
    on_refused: Callable[[KvpoolError], None]

    def refuse(self, error: DeniedError) -> NoReturn:
        """Reports a refusal and raises its error."""
        self.on_refused(error)
        raise error


CALLER: Final[ContextVar[Caller | None]] = ContextVar("kvpool_caller", default=None)
"""The caller of the current task's call; None without tokens."""


def token_name() -> str:
    """The name of the caller's token; empty without tokens."""
    caller = CALLER.get()
    return caller.grant.name if caller else ""


def tenant() -> bytes | None:
    """The namespace of a caller that must learn nothing of others; None for an operator, and without tokens."""
    caller = CALLER.get()
    return caller.grant.namespace if caller and caller.grant.role is not Role.ADMIN else None


def can_see(pool_name: str) -> bool:
    """Whether responses to the caller may include a pool."""
    caller = CALLER.get()
    return caller is None or caller.grant.covers(pool_name)


def check_pool(name: str, field: str = "pool_name") -> None:
    """Raises DeniedError if the caller's token does not cover a pool of this name."""
    caller = CALLER.get()
    if caller and not caller.grant.covers(name):
        caller.refuse(DeniedError("POOL", "the token does not cover a pool of this name", field=field))


def check_server(field: str = "") -> None:
    """Raises DeniedError if the caller's token does not cover all pools; `field` is empty because all are meant."""
    caller = CALLER.get()
    if caller and not caller.grant.covers_all:
        message = "the token does not cover all pools"
        caller.refuse(DeniedError("POOL", f"is empty, and {message}" if field else message, field=field))


def check_session(state: State, session_id: str) -> None:
    """Raises DeniedError if another token opened the session, or the caller's no longer covers its pool."""
    caller = CALLER.get()
    found = state.sessions.get(session_id) if caller else None
    if caller and found:  # the call itself reports that a session does not exist
        pool, session = found
        if session.owner != caller.grant.name:
            caller.refuse(DeniedError("SESSION", "the session belongs to another token", field="session_id"))
        check_pool(pool.config.name, "session_id")
