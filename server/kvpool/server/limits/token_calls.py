"""Limits the calls in flight per token, so that one token cannot use up all calls that the server accepts."""

import inspect
from collections import Counter
from functools import partial

import grpc

from kvpool.core.errors import ExhaustedError
from kvpool.server.auth.caller import SHOWN_TOKEN
from kvpool.server.limits.config import RETRY_SECONDS
from kvpool.server.metrics.observations import Observations
from kvpool.server.rpc import Behavior, Context, Handler, Interceptor, abort, behavior_of, method_of, rewrapped


class TokenCallLimiter(Interceptor):
    """The outermost interceptor, so that a call counts from its start, also while the server waits for its request.

    Reflection streams do not count: their number is limited separately.

    Args:
        max_calls: Maximum number of calls in flight with the tokens of one name, streams included.
        observations: Counts refused calls.
    """

    def __init__(self, max_calls: int, observations: Observations) -> None:
        self._max_calls = max_calls
        self._observations = observations
        self._num_calls: Counter[str] = Counter()

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Wraps a call in the count."""
        behavior, name = behavior_of(handler), SHOWN_TOKEN.get()
        if not name or inspect.isasyncgenfunction(behavior):
            return handler
        return rewrapped(handler, partial(self._answer, behavior, method_of(details), name))

    async def _answer(self, behavior: Behavior, method: str, name: str, request: object, context: Context) -> object:
        if self._num_calls[name] >= self._max_calls:
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
