"""The token file of a server, reloaded while the server runs."""

import logging
from datetime import UTC, datetime, time
from functools import partial
from pathlib import Path
from typing import Final

from kvpool.core.errors import DeniedError, UnauthenticatedError
from kvpool.server.auth.files import ReloadedFiles
from kvpool.server.auth.tokens import Grant, Role, find, read_tokens

_DAY_SECONDS: Final = 86_400

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

    @property
    def age_seconds(self) -> float:
        """Time since the file was last found to contain the grants in force."""
        return self.files.age_seconds

    @property
    def expires_seconds(self) -> float | None:
        """When the first of the valid tokens expires, in seconds since 1970; None if none of them does. O(tokens)."""
        today = datetime.now(UTC).date()
        days = [grant.expires for grant in self.grants if grant.expires and grant.is_valid_on(today)]
        return datetime.combine(min(days), time.min, UTC).timestamp() + _DAY_SECONDS if days else None

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
