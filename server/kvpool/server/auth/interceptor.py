"""Asks every call for its token, and what the token allows, before the service hears of it."""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import grpc
from google.protobuf.message import Message

from kvpool.core.allocator import Allocator
from kvpool.core.errors import DeniedError, KvpoolError, UnauthenticatedError, UnavailableError
from kvpool.server.auth.caller import CALLER, SHOWN_TOKEN, Caller
from kvpool.server.auth.files import Reloaded
from kvpool.server.auth.permissions import Scope, pool_name_of, rule_of, session_id_of
from kvpool.server.auth.tokens import Grant, find, read_tokens
from kvpool.server.metrics.observations import Observations
from kvpool.server.rpc.guards import abort
from kvpool.server.rpc.handlers import Behavior, Handler, behavior_of, method_of, rewrapped

WATCH_SECONDS: Final = 1.0
"""How often open streams are compared with the tokens."""

_LOG_SECONDS: Final = 1.0
"""At most one line of refusals is logged in so long: whoever knocks must not fill the log."""

_BEARER: Final = "bearer "

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_log = logging.getLogger("kvpool.server.auth")


def utc_today() -> date:
    """The date by which tokens expire."""
    return datetime.now(UTC).date()


@dataclass(frozen=True, slots=True)
class _Visit:
    """A call whose token is good, and whose request is still to come.

    Attributes:
        method: What is called.
        scope: Where the request says what it is about.
        grant: What the token allows.
        grants: All that were good then.
    """

    method: str
    scope: Scope
    grant: Grant
    grants: tuple[Grant, ...]


class OpenStream(Protocol):
    """A long-lived call."""

    @property
    def caller(self) -> Caller | None:
        """The holder of the token that the call came with."""

    def end(self, error: KvpoolError) -> None:
        """Ends the call with an error."""


class OpenStreams(Protocol):
    """The server, as the interceptor uses it: its sessions and its long-lived calls."""

    allocator: Allocator

    def streams(self) -> Sequence[OpenStream]:
        """The long-lived calls that are open now."""


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor over a file of tokens.

    Args:
        tokens: The file.
        hub: Whose streams are ended when their token is no longer good.
        observations: Where refusals are counted, if metrics are asked for.
        today: Tells the date.

    Raises:
        ValueError: The file is no good.
    """

    def __init__(
        self, tokens: Path, hub: OpenStreams, observations: Observations | None, today: Callable[[], date] = utc_today
    ) -> None:
        self._grants = Reloaded((tokens,), partial(read_tokens, tokens))
        self._hub = hub
        self._observations = observations
        self._today = today
        self._unlogged = 0
        self._quiet_until_seconds = 0.0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Puts the question before a call."""
        handler = await continuation(handler_call_details)
        method = method_of(handler_call_details)
        rule = rule_of(method)
        if handler is None or rule is None:
            return handler
        self._refresh()
        try:
            grant = self._recognize(handler_call_details.invocation_metadata)
        except UnauthenticatedError as error:
            return self._refusing(method, "", error)
        if grant.role not in rule.roles:
            denied = DeniedError("ROLE", f"a token of the role {grant.role} may not call this")
            return self._refusing(method, grant.name, denied)
        SHOWN_TOKEN.set(grant.name)
        visit = _Visit(method, rule.scope, grant, self._grants.value)
        behavior = behavior_of(handler)
        if inspect.isasyncgenfunction(behavior):  # reflection's
            return rewrapped(handler, partial(self._answer_all, behavior, visit))
        return rewrapped(handler, partial(self._answer, behavior, visit))

    async def watch(self) -> None:
        """Ends the streams of tokens that are revoked, changed or expired, for ever."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self._refresh()
            for stream in self._hub.streams():
                error = self._objection(stream.caller.grant) if stream.caller else None
                if error:
                    stream.end(error)

    def _refusing(self, method: str, token_name: str, error: KvpoolError) -> "Handler":
        """What ends a call at once: one of a stream, whatever the method is, since that waits for no message."""

        async def refuse(_: object, context: _Context) -> None:
            self._refused(method, str(context.peer()), token_name, error)
            await abort(context, error, method)

        return grpc.stream_unary_rpc_method_handler(refuse)

    async def _answer(self, behavior: Behavior, visit: "_Visit", request: Message, context: _Context) -> object:
        try:
            CALLER.set(self._admit(visit, request, context))
        except KvpoolError as error:
            await abort(context, error, visit.method)
        return await behavior(request, context)

    async def _answer_all(
        self,
        behavior: Callable[[Any, Any], AsyncIterator[object]],
        visit: "_Visit",
        request: Message,
        context: _Context,
    ) -> AsyncIterator[object]:
        try:
            self._admit(visit, request, context)
            async for response in behavior(request, context):
                self._refresh()
                error = self._objection(visit.grant)
                if error:
                    raise error
                yield response
        except KvpoolError as error:
            await abort(context, error, visit.method)

    def _admit(self, visit: "_Visit", request: Message, context: _Context) -> Caller:
        """Returns who calls, if that may be, now that the request is there.

        Raises:
            KvpoolError: The token is no longer good, or not for this.
        """
        refused = partial(self._refused, visit.method, str(context.peer()), visit.grant.name)
        if self._grants.value is not visit.grants and (error := self._objection(visit.grant)):
            refused(error)
            raise error
        caller = Caller(visit.grant, refused)
        self._check_scope(caller, visit.scope, request)
        return caller

    def _recognize(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Grant:
        shown = next((str(value) for key, value in metadata or () if key == "authorization"), "")
        if not shown.lower().startswith(_BEARER):
            raise UnauthenticatedError("NO_TOKEN", "this server wants a token: authorization: Bearer TOKEN")
        grant = find(self._grants.value, shown[len(_BEARER) :].strip())
        if grant is None:
            raise UnauthenticatedError("UNKNOWN_TOKEN", "the token is unknown, or was revoked")
        if not grant.is_good_on(self._today()):
            raise UnauthenticatedError("TOKEN_EXPIRED", "the token has expired")
        return grant

    def _check_scope(self, caller: Caller, scope: Scope, request: Message) -> None:
        pool_name, session_id = pool_name_of(scope, request), session_id_of(scope, request)
        if session_id is not None:
            caller.check_session(self._hub.allocator, session_id)
        elif scope is Scope.POOL_OR_SERVER and not pool_name:
            caller.check_server()
        elif pool_name is not None:
            caller.check_pool(pool_name, "config.name" if scope is Scope.CONFIG else "pool_name")

    def _objection(self, grant: Grant) -> KvpoolError | None:
        """Why a call that was let in must end; None if nothing has changed."""
        if grant in self._grants.value:
            expired = UnauthenticatedError("TOKEN_EXPIRED", "the token has expired")
            return None if grant.is_good_on(self._today()) else expired
        if any(grant.name == other.name for other in self._grants.value):
            return UnavailableError("TOKEN_CHANGED", "what the token allows has changed", retry_seconds=0.1)
        return UnauthenticatedError("TOKEN_REVOKED", "the token was revoked")

    def _refresh(self) -> None:
        try:
            if self._grants.refresh():
                _log.info("tokens exchanged", extra={"tokens": len(self._grants.value)})
        except ValueError as error:
            _log.error("tokens not taken", extra={"error": str(error)})

    def _refused(self, method: str, peer: str, token_name: str, error: KvpoolError) -> None:
        if self._observations:
            self._observations.refusal(error.reason)
        self._unlogged += 1
        now_seconds = time.monotonic()
        if now_seconds < self._quiet_until_seconds:
            return
        extra = {"method": method, "peer": peer, "token_name": token_name, "reason": error.reason}
        _log.warning("refused at the door", extra={**extra, "calls": self._unlogged})
        self._unlogged, self._quiet_until_seconds = 0, now_seconds + _LOG_SECONDS
