"""Authenticates and authorizes each call before the service sees it, and limits the calls of each token."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from kvpool.core.errors import DeniedError, ExhaustedError, KvpoolError, UnauthenticatedError, UnavailableError
from kvpool.core.state import State
from kvpool.server.auth.caller import CALLER, Caller, check_pool, check_server, check_session
from kvpool.server.auth.permissions import Scope, rule_of
from kvpool.server.auth.token_file import TokenFile
from kvpool.server.auth.tokens import Grant
from kvpool.server.guard.call import GuardedCall
from kvpool.server.limits.config import RETRY_SECONDS
from kvpool.server.metrics.observations import Observations
from kvpool.server.services.calls import Calls

_LOG_SECONDS: Final = 1.0
"""Minimum time between two log records of refusals, so that a client cannot fill the log."""

_BEARER: Final = "bearer "

_log = logging.getLogger("kvpool.server.auth")


class TokenCheck:
    """The check of a server with a token file.

    Args:
        tokens: The token file.
        state: The server's sessions, which belong to tokens.
        calls: The long-lived calls. A call is ended when its token becomes invalid.
        max_calls: Maximum number of calls in flight with the tokens of one name, streams included.
        observations: Counts refusals.
    """

    def __init__(
        self,
        tokens: TokenFile,
        state: State,
        calls: Calls,
        max_calls: int,
        observations: Observations,
    ) -> None:
        self._tokens = tokens
        self._state = state
        self._calls = calls
        self._max_calls = max_calls
        self._observations = observations
        self._num_calls: Counter[str] = Counter()
        self._unlogged = 0
        self._log_after_seconds = 0.0

    def authenticate(self, call: GuardedCall) -> None:
        """Finds the permissions of a call's token, or why it will be refused."""
        rule = rule_of(call.method)
        if rule is None:
            return
        self._tokens.refresh()
        call.grants = self._tokens.grants
        header = call.header("authorization")
        if not header.lower().startswith(_BEARER):
            message = "this server requires a token: authorization: Bearer TOKEN"
            call.refusal = UnauthenticatedError("NO_TOKEN", message)
            return
        try:
            call.grant = self._tokens.authenticate(header[len(_BEARER) :].strip())
        except UnauthenticatedError as error:
            call.refusal = error
            return
        if call.grant.role not in rule.roles:
            call.refusal = DeniedError("ROLE", f"a token of the role {call.grant.role} may not call this")

    @contextlib.contextmanager
    def counted(self, call: GuardedCall) -> Iterator[None]:
        """Counts a call among those of its token, also while the server waits for its request.

        Raises:
            ExhaustedError: The token has the maximum number of calls.
        """
        if call.grant is None or call.refusal:
            yield
            return
        name = call.grant.name
        if self._num_calls[name] >= self._max_calls:
            message = f"{self._max_calls} calls of the token {name!r} are in flight, the maximum"
            raise ExhaustedError("TOO_MANY_TOKEN_CALLS", message, retry_seconds=RETRY_SECONDS)
        self._num_calls[name] += 1
        try:
            yield
        finally:
            self._num_calls[name] -= 1
            if not self._num_calls[name]:
                del self._num_calls[name]

    def authorize(self, call: GuardedCall, request: Any) -> None:  # noqa: ANN401 - a message
        """Sets the caller of an authenticated call, and checks its request.

        Raises:
            KvpoolError: The call has no valid token, its role may not call the method, the token has become invalid
                meanwhile, or it does not cover the pool or session of the request.
        """
        name = call.grant.name if call.grant else ""
        refused = partial(self._refused, call.method, str(call.context.peer()), name)
        error = call.refusal
        if call.grant and not error and self._tokens.grants is not call.grants:
            error = self._invalidity(call.grant)
        if error:
            refused(error)
            raise error
        rule = rule_of(call.method)
        if rule is None or call.grant is None:
            return
        CALLER.set(Caller(call.grant, refused))
        match rule.scope:
            case Scope.SESSION:
                check_session(self._state, request.session_id)
            case Scope.CONFIG:
                check_pool(request.config.name, "config.name")
            case Scope.POOL:
                check_pool(request.pool_name)
            case Scope.POOL_OR_SERVER | Scope.POOL_OR_VISIBLE if request.pool_name:
                check_pool(request.pool_name)
            case Scope.POOL_OR_SERVER:
                check_server("pool_name")
            case Scope.SERVER:
                check_server()

    def recheck(self) -> None:
        """Ends open calls whose token is revoked, changed or expired."""
        self._tokens.refresh()
        for call in self._calls.all_open():
            error = self._invalidity(call.caller.grant) if call.caller else None
            if error:
                call.end(error)

    def _invalidity(self, grant: Grant) -> KvpoolError | None:
        """The reason to end an authorized call; None if its token is still valid and unchanged."""
        if grant in self._tokens.grants:
            expired = UnauthenticatedError("TOKEN_EXPIRED", "the token has expired")
            return None if grant.is_valid_now else expired
        if any(grant.name == other.name for other in self._tokens.grants):
            return UnavailableError("TOKEN_CHANGED", "the permissions of the token have changed", retry_seconds=0.1)
        return UnauthenticatedError("TOKEN_REVOKED", "the token was revoked")

    def _refused(self, method: str, peer: str, token_name: str, error: KvpoolError) -> None:
        self._observations.refusals[error.reason] += 1
        self._unlogged += 1
        now_seconds = time.monotonic()
        if now_seconds < self._log_after_seconds:
            return
        extra = {"method": method, "peer": peer, "token_name": token_name, "reason": error.reason}
        _log.warning("calls not authorized", extra={**extra, "calls": self._unlogged})
        self._unlogged, self._log_after_seconds = 0, now_seconds + _LOG_SECONDS
