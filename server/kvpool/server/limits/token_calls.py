"""Limits the calls in flight per token, so that one token cannot use up all calls that the server accepts."""

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from kvpool.core.errors import ExhaustedError
from kvpool.server.auth.caller import SHOWN_TOKEN
from kvpool.server.limits.config import RETRY_SECONDS
from kvpool.server.metrics.observations import Observations
from kvpool.server.rpc import Behavior, Handler, abort, behavior_of, method_of, rewrapped


class TokenCallLimiter(grpc.aio.ServerInterceptor):
    """The outermost interceptor, so that a call counts from its start, also while the server waits for its request.

    Reflection streams do not count: their number is limited separately.

    Args:
        max_calls: Maximum number of calls in flight with the tokens of one name, streams included.
        observations: Counts refused calls; None without metrics.
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
        """Wraps a call in the count."""
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
                message = f"{self._max_calls} calls of the token {name!r} are in flight, the maximum"
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
