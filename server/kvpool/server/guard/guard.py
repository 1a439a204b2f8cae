"""The guard: what is checked around each call of a server, in this order if the call has one request.

| | check | refused with | in |
|-:|---|---|---|
| 1 | connections of the address | the connection is closed | gRPC, `limits/connections.py` |
| 2 | calls in flight; bytes of a message | gRPC's own RESOURCE_EXHAUSTED | gRPC, see `app.py` |
| 3 | calls of the token | `TOO_MANY_TOKEN_CALLS` | `token_check.py` |
| 4 | the request arrives | `NOTHING_SENT` | `request_reader.py` |
| 5 | size, fields and format of each message | `MESSAGE_TOO_LARGE`, `MALFORMED` | `limits/messages.py` |
| 6 | the server is the primary | `NOT_PRIMARY` with its address | `primary_check.py` |
| 7 | token | `NO_TOKEN`, `UNKNOWN_TOKEN`, `TOKEN_EXPIRED` | `token_check.py` |
| 8 | role of the token | `ROLE` | `token_check.py` |
| 9 | the token is still valid | `TOKEN_REVOKED`, `TOKEN_CHANGED`, `TOKEN_EXPIRED` | `token_check.py` |
| 10 | scope: the pool or session of the request | `POOL`, `SESSION` | `auth/caller.py` |

Then the service waits for its turn, finds the session, and checks limits and budgets. A deadline of the client ends the
call at any point.

1. A call without permission (7, 8) is known from its headers. It skips 3 to 5, so its request is never read.
2. The primary is checked first all the same: a token may have reached it and not yet its standbys.
3. A stream of requests passes 1 to 3 and 6 to 9 when it opens. Each message passes 5, and the first one 4 and 10, in
   the service.
4. Errors of the service become statuses here. They pass the gate of a primary as answers do.
5. A call is counted once, with its final status; one that exceeds a limit also by its reason. Calls of methods that do
   not exist are not counted, and neither are those that gRPC refuses itself (1, 2).
"""

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from kvpool.core.errors import OUT_OF_MEMORY, ExhaustedError
from kvpool.server.guard.call import GuardedCall
from kvpool.server.guard.primary_check import GatedContext, PrimaryCheck
from kvpool.server.guard.request_reader import RequestReader
from kvpool.server.guard.statuses import abort_with
from kvpool.server.guard.token_check import TokenCheck
from kvpool.server.limits.config import Limits
from kvpool.server.limits.messages import parser_of
from kvpool.server.limits.streams import Context
from kvpool.server.metrics.observations import Observations

if TYPE_CHECKING:
    from kvpool.server.tracing import Tracer

Behavior: TypeAlias = Callable[[Any, Any], Awaitable[object]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Guard(grpc.aio.ServerInterceptor):
    """The interceptor of a server. It wraps a handler once, so that a message of a stream passes one more function.

    Args:
        limits: The server's limits.
        observations: Counts the calls.
        tokens: Checks tokens; None for a server without.
        primary: Checks the server of a shard; None without a cluster.
        tracer: Traces the calls; None for none.
    """

    def __init__(
        self,
        limits: Limits,
        observations: Observations,
        tokens: TokenCheck | None,
        primary: PrimaryCheck | None,
        tracer: "Tracer | None" = None,
    ) -> None:
        self._limits = limits
        self._tracer = tracer
        self._observations = observations
        self._requests = RequestReader(limits.stall_seconds)
        self._tokens = tokens
        self._primary = primary

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Returns the guarded handler of a call; None if there is no such method."""
        handler = await continuation(handler_call_details)
        return self.wrap(handler, str(handler_call_details.method).removeprefix("/")) if handler else None

    def wrap(self, handler: "Handler", method: str) -> "Handler":
        """Returns the handler that serves the calls of a method instead of its own.

        It is one of streams, as only such a handler is called before the request has arrived.
        """
        behavior = _behavior_of(handler)

        async def serve(_: object, context: Context) -> object:
            with GuardedCall(method, context, self._observations, self._tracer) as call:
                try:
                    if self._tokens:
                        self._tokens.authenticate(call)
                    with self._tokens.counted(call) if self._tokens else nullcontext():
                        response = await behavior(await self._admitted(call, handler), call.context)
                        if response is not None and isinstance(call.context, GatedContext):
                            await call.context.passes()  # streams write through the context
                        return response
                except grpc.aio.AbortError:  # it has its status: from the gate, or from a service of gRPC
                    raise
                except Exception as error:  # noqa: BLE001 - the boundary: a bug must end this call alone, and is logged
                    if isinstance(error, ExhaustedError | MemoryError):
                        self._observations.limit_refusals[getattr(error, "reason", OUT_OF_MEMORY)] += 1
                    await abort_with(call.context, error, method)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(serve, parser_of(handler.request_deserializer, method, self._limits), handler.response_serializer)

    async def _admitted(self, call: GuardedCall, handler: "Handler") -> object:
        """Checks a call up to its scope, and returns its request; None for a stream of requests."""
        request = None
        if not handler.request_streaming and not call.refusal:
            request = await self._requests.read(call)
            if not handler.response_streaming:
                call.start()
        if self._primary:
            self._primary.admit(call)
        if self._tokens:
            self._tokens.authorize(call, request)
        return request


def _behavior_of(handler: "Handler") -> Behavior:
    """The function of a handler, which is of one of four kinds."""
    of_kinds: Any = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    behavior: Behavior = next(filter(None, of_kinds))
    return behavior
