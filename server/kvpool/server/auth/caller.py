"""Who makes the call that is being served, and what that token may not do.

1. The caller is known to the task of its call alone; a server without tokens knows none, and lets all do everything.
2. What is refused to a token does not depend on whether it is there.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

from kvpool.core.allocator import Allocator
from kvpool.core.errors import DeniedError, KvpoolError
from kvpool.server.auth.tokens import Grant


class Caller:
    """The holder of a token.

    Args:
        grant: What the token allows.
        refused: Told of each refusal.
    """

    def __init__(self, grant: Grant, refused: Callable[[KvpoolError], None]) -> None:
        self.grant = grant
        self._refused = refused

    def check_pool(self, name: str, field: str = "pool_name") -> None:
        """Raises DeniedError if the token is not for a pool of this name."""
        if not self.grant.covers(name):
            self._refuse(DeniedError("POOL", "the token is not for a pool of this name", field=field))

    def check_server(self) -> None:
        """Raises DeniedError if the token is not for all pools."""
        if not self.grant.covers_all:
            self._refuse(DeniedError("POOL", "empty, and the token is not for all pools", field="pool_name"))

    def check_session(self, allocator: Allocator, session_id: str) -> None:
        """Raises DeniedError if a session is another's, or of a pool that the token is not for any more."""
        found = allocator.owner(session_id)
        if found is None:
            return  # what follows says what became of it
        pool_name, owner = found
        if owner != self.grant.name:
            self._refuse(DeniedError("SESSION", "the session belongs to another token", field="session_id"))
        self.check_pool(pool_name, "session_id")

    def _refuse(self, error: KvpoolError) -> None:
        self._refused(error)
        raise error


CALLER: Final[ContextVar[Caller | None]] = ContextVar("kvpool_caller", default=None)
"""The caller of the current task's call; None where no token is asked for."""

SHOWN_TOKEN: Final[ContextVar[str]] = ContextVar("kvpool_shown_token", default="")
"""Name of the token that the current task's call has shown, before its request is there; empty for none."""


def token_name() -> str:
    """The name of the caller's token; empty where none is asked for."""
    caller = CALLER.get()
    return caller.grant.name if caller else ""


def sees(pool_name: str) -> bool:
    """Whether the caller may be told of a pool."""
    caller = CALLER.get()
    return caller is None or caller.grant.covers(pool_name)


def check_pool(name: str, field: str) -> None:
    """Raises DeniedError if a pool of this name is not for the caller."""
    caller = CALLER.get()
    if caller:
        caller.check_pool(name, field)


def check_session(allocator: Allocator, session_id: str) -> None:
    """Raises DeniedError if a session is not the caller's."""
    caller = CALLER.get()
    if caller:
        caller.check_session(allocator, session_id)
