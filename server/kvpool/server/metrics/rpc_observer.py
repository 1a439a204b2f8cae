"""Counts and times all calls of a server."""

import asyncio
import inspect
import time
from typing import Any, Final

import grpc

from kvpool.server.metrics.observations import Observations
from kvpool.server.rpc import Behavior, Handler, Interceptor, behavior_of, method_of, rewrapped

_CODES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


class RpcObserver(Interceptor):
    """An interceptor. It counts existing methods only, so that a client cannot invent label values."""

    def __init__(self, observations: Observations) -> None:
        self._observations = observations

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Counts a call and measures its duration."""
        behavior = behavior_of(handler)
        if not inspect.iscoroutinefunction(behavior):  # a generator of responses; only reflection has one
            return handler
        is_unary = not handler.request_streaming and not handler.response_streaming
        return rewrapped(handler, self._observed(behavior, method_of(details), is_unary=is_unary))

    def _observed(self, behavior: Behavior, method: str, *, is_unary: bool) -> Behavior:
        async def call(request: object, context: "grpc.aio.ServicerContext[Any, Any]") -> object:
            start = time.perf_counter()
            code = grpc.StatusCode.UNKNOWN.name
            try:
                answer = await behavior(request, context)
                code = _code(context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED.name
                raise
            except grpc.aio.AbortError:
                code = _code(context)
                raise
            finally:
                self._observations.rpc(method, code, time.perf_counter() - start if is_unary else None)
            return answer

        return call


def _code(context: "grpc.aio.ServicerContext[Any, Any]") -> str:
    """Name of a call's final status; a status that was never set is OK."""
    code: Any = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code or 0, "UNKNOWN")
