"""Keeps the calls in flight of one token so few that others get theirs."""

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from kvpool.core.errors import ExhaustedError
from kvpool.server.auth.caller import SHOWN_TOKEN
from kvpool.server.limits.config import RETRY_SECONDS
from kvpool.server.metrics.observations import Observations
from kvpool.server.rpc.guards import abort
from kvpool.server.rpc.handlers import Behavior, Handler, behavior_of, method_of, rewrapped


class TokenCalls(grpc.aio.ServerInterceptor):
    """An interceptor before all others, so that a call counts from its beginning, also while its request is waited for.

    Streams of reflection do not count: these are few in any case.

    Args:
        max_calls: Most calls of the tokens of one name at a time, streams included.
        observations: Where calls are counted that are refused, if metrics are asked for.
    """

    def __init__(self, max_calls: int, observations: Observations | None) -> None:
        self._max_calls = max_calls
        self._observations = observations
        self._num_calls: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Puts the count around a call."""
        handler = await continuation(handler_call_details)
        name = SHOWN_TOKEN.get()
        if handler is None or not name or inspect.isasyncgenfunction(behavior_of(handler)):
            return handler
        method = method_of(handler_call_details)
        return rewrapped(handler, self._counted(behavior_of(handler), method, name))

    def _counted(self, behavior: Behavior, method: str, name: str) -> Behavior:
        async def call(request: object, context: "grpc.aio.ServicerContext[Any, Any]") -> object:
            if self._num_calls[name] >= self._max_calls:
                if self._observations:
                    self._observations.rpc(method, grpc.StatusCode.RESOURCE_EXHAUSTED.name, None)
                message = f"{self._max_calls} calls of the token {name!r} are in flight, as many as may be"
                error = ExhaustedError("TOO_MANY_TOKEN_CALLS", message, retry_seconds=RETRY_SECONDS)
                await abort(context, error, method)
            self._num_calls[name] += 1
            try:
                return await behavior(request, context)
            finally:
                self._num_calls[name] -= 1
                if not self._num_calls[name]:
                    del self._num_calls[name]

        return call
