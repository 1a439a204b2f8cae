"""Authenticates and authorizes each call before the service sees it."""

import inspect
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import grpc

from kvpool.core.errors import DeniedError, KvpoolError, UnauthenticatedError, UnavailableError
from kvpool.core.state import State
from kvpool.server.auth.caller import CALLER, SHOWN_TOKEN, Caller, check_pool, check_server, check_session
from kvpool.server.auth.permissions import Scope, rule_of
from kvpool.server.auth.token_file import TokenFile
from kvpool.server.auth.tokens import Grant
from kvpool.server.metrics.observations import Observations
from kvpool.server.rpc import Behavior, Context, Handler, Interceptor, abort, behavior_of, method_of, rewrapped

_LOG_SECONDS: Final = 1.0
"""Minimum time between two log records of refusals, so that a client cannot fill the log."""

_BEARER: Final = "bearer "

_log = logging.getLogger("kvpool.server.auth")


@dataclass(frozen=True, slots=True)
class _AuthenticatedCall:
    """A call with a valid token, whose request has not been checked.

    Attributes:
        method: The called method.
        scope: Field of the request that names its pool or session.
        grant: Permissions of the token.
        grants: All grants at the time of authentication.
    """

    method: str
    scope: Scope
    grant: Grant
    grants: tuple[Grant, ...]


class OpenCall(Protocol):
    """A long-lived call."""

    @property
    def caller(self) -> Caller | None:
        """The holder of the call's token."""

    def end(self, error: KvpoolError) -> None:
        """Ends the call with an error."""


class AuthInterceptor(Interceptor):
    """An interceptor that accepts the tokens of a file.

    Args:
        tokens: The token file.
        state: The server's sessions, which belong to tokens.
        open_calls: Returns the long-lived calls that are open now. A call is ended when its token becomes invalid.
        observations: Counts refusals.
    """

    def __init__(
        self,
        tokens: TokenFile,
        state: State,
        open_calls: Callable[[], Sequence[OpenCall]],
        observations: Observations,
    ) -> None:
        self._tokens = tokens
        self._state = state
        self._open_calls = open_calls
        self._observations = observations
        self._unlogged = 0
        self._log_after_seconds = 0.0

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Authenticates a call, checks its role, and wraps it in the check of its request."""
        method = method_of(details)
        rule = rule_of(method)
        if rule is None:
            return handler
        self._tokens.refresh()
        try:
            grant = self._authenticate(details.invocation_metadata)
        except UnauthenticatedError as error:
            return self._refusing(method, "", error)
        if grant.role not in rule.roles:
            denied = DeniedError("ROLE", f"a token of the role {grant.role} may not call this")
            return self._refusing(method, grant.name, denied)
        SHOWN_TOKEN.set(grant.name)
        call = _AuthenticatedCall(method, rule.scope, grant, self._tokens.grants)
        behavior = behavior_of(handler)
        if inspect.isasyncgenfunction(behavior):  # reflection
            return rewrapped(handler, partial(self._answer_all, behavior, call))
        return rewrapped(handler, partial(self._answer, behavior, call))

    def recheck(self) -> None:
        """Ends open calls whose token is revoked, changed or expired."""
        self._tokens.refresh()
        for call in self._open_calls():
            error = self._invalidity(call.caller.grant) if call.caller else None
            if error:
                call.end(error)

    def _refusing(self, method: str, token_name: str, error: KvpoolError) -> "Handler":
        """Makes a handler that refuses the call at once. It is a stream handler, which waits for no message."""

        async def refuse(_: object, context: Context) -> None:
            self._refused(method, str(context.peer()), token_name, error)
            await abort(context, error, method)

        return grpc.stream_unary_rpc_method_handler(refuse)

    async def _answer(self, behavior: Behavior, call: _AuthenticatedCall, request: object, context: Context) -> object:
        try:
            self._authorize(call, request, context)
        except KvpoolError as error:
            await abort(context, error, call.method)
        return await behavior(request, context)

    async def _answer_all(
        self,
        behavior: Callable[[Any, Any], AsyncIterator[object]],
        call: _AuthenticatedCall,
        request: object,
        context: Context,
    ) -> AsyncIterator[object]:
        try:
            self._authorize(call, request, context)
            async for response in behavior(request, context):
                self._tokens.refresh()
                error = self._invalidity(call.grant)
                if error:
                    raise error
                yield response
        except KvpoolError as error:
            await abort(context, error, call.method)

    def _authorize(self, call: _AuthenticatedCall, request: Any, context: Context) -> None:  # noqa: ANN401 - a message
        """Sets the caller of an authenticated call, and checks its request.

        Raises:
            KvpoolError: The token has become invalid, or does not cover the pool or session of the request.
        """
        refused = partial(self._refused, call.method, str(context.peer()), call.grant.name)
        if self._tokens.grants is not call.grants and (error := self._invalidity(call.grant)):
            refused(error)
            raise error
        CALLER.set(Caller(call.grant, refused))
        match call.scope:
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

    def _authenticate(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Grant:
        header = next((str(value) for key, value in metadata or () if key == "authorization"), "")
        if not header.lower().startswith(_BEARER):
            raise UnauthenticatedError("NO_TOKEN", "this server requires a token: authorization: Bearer TOKEN")
        return self._tokens.authenticate(header[len(_BEARER) :].strip())

    def _invalidity(self, grant: Grant) -> KvpoolError | None:
        """The reason to end an authorized call; None if its token is still valid and unchanged."""
        if grant in self._tokens.grants:
            expired = UnauthenticatedError("TOKEN_EXPIRED", "the token has expired")
            return None if grant.is_valid_now else expired
        if any(grant.name == other.name for other in self._tokens.grants):
            return UnavailableError("TOKEN_CHANGED", "the permissions of the token have changed", retry_seconds=0.1)
        return UnauthenticatedError("TOKEN_REVOKED", "the token was revoked")

    def _refused(self, method: str, peer: str, token_name: str, error: KvpoolError) -> None:
        self._observations.refusal(error.reason)
        self._unlogged += 1
        now_seconds = time.monotonic()
        if now_seconds < self._log_after_seconds:
            return
        extra = {"method": method, "peer": peer, "token_name": token_name, "reason": error.reason}
        _log.warning("calls not authorized", extra={**extra, "calls": self._unlogged})
        self._unlogged, self._log_after_seconds = 0, now_seconds + _LOG_SECONDS
