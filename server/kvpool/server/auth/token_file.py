"""The token file of a server, reloaded while the server runs."""

import logging
from functools import partial
from pathlib import Path

from kvpool.core.errors import DeniedError, UnauthenticatedError
from kvpool.server.auth.files import ReloadedFiles
from kvpool.server.auth.tokens import Grant, Role, find, read_tokens

_log = logging.getLogger("kvpool.server.auth")


class TokenFile:
    """The tokens that a server accepts, from clients and from standbys.

    Args:
        path: Path of the file.

    Raises:
        ValueError: The file is invalid.

    Attributes:
        files: The file, with the grants in force.
    """

    def __init__(self, path: Path) -> None:
        self.files = ReloadedFiles((path,), partial(read_tokens, path))

    @property
    def grants(self) -> tuple[Grant, ...]:
        """The grants in force."""
        return self.files.value

    def refresh(self) -> None:
        """Reloads the file if it has changed."""
        try:
            if self.files.refresh():
                _log.info("tokens reloaded", extra={"tokens": len(self.grants)})
        except ValueError as error:
            _log.error("tokens not reloaded", extra={"error": str(error)})

    def authenticate(self, token: str) -> Grant:
        """Finds the grant of a token.

        Raises:
            UnauthenticatedError: The token is unknown or has expired.
        """
        grant = find(self.grants, token)
        if grant is None:
            raise UnauthenticatedError("UNKNOWN_TOKEN", "the token is unknown, or was revoked")
        if not grant.is_valid_now:
            raise UnauthenticatedError("TOKEN_EXPIRED", "the token has expired")
        return grant

    def check_standby(self, token: str) -> None:
        """Checks that a standby with this token may have the state, according to the file as it is now.

        Raises:
            UnauthenticatedError: The token is unknown or has expired.
            DeniedError: The token has another role, or does not cover all pools.
        """
        self.refresh()
        grant = self.authenticate(token)
        if grant.role is not Role.STANDBY or not grant.covers_all:
            raise DeniedError("ROLE", "a standby needs a token of the role standby for all pools")
