"""Counts all calls of a server and measures their duration."""

import asyncio
import inspect
import time
from functools import partial
from typing import Any, Final

import grpc

from kvpool.server.metrics.observations import Observations
from kvpool.server.rpc import Behavior, Context, Handler, Interceptor, behavior_of, method_of, rewrapped

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
        return rewrapped(handler, partial(self._answer, behavior, method_of(details), is_unary=is_unary))

    async def _answer(
        self, behavior: Behavior, method: str, request: object, context: Context, *, is_unary: bool
    ) -> object:
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


def _code(context: Context) -> str:
    """Name of a call's final status; a status that was never set is OK."""
    code: Any = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code or 0, "UNKNOWN")
