"""Calls of one request are served as streams of which one message is read.

gRPC itself would wait for that message as long as the client likes, before any code of ours hears of the call; and of
one that cannot be parsed it would answer UNKNOWN, without details, and log a traceback for each.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from kvpool.core.errors import ExhaustedError, InvalidArgumentError, KvpoolError
from kvpool.server.auth.permissions import rule_of
from kvpool.server.metrics.observations import Observations
from kvpool.server.rpc.guards import abort
from kvpool.server.rpc.handlers import Behavior, Handler, behavior_of, method_of
from kvpool.wire.errors import CODES, malformed_error

MAX_WAITING_STRANGERS: Final = 32
"""Most calls that need no token and whose request is not there yet. Each may hold a message that is not whole."""

_Context = grpc.aio.ServicerContext[Any, Any]


class OneRequest(grpc.aio.ServerInterceptor):
    """An interceptor that reads the request, and calls what is behind it with that.

    Who needs no token could hold all calls that the server takes, a new one for each that is ended. So of such calls
    few may wait. One more ends the one that has waited longest, of the host that has most: who lets requests wait loses
    calls of its own, and the probe of another host none.

    Args:
        stall_seconds: How long a request may take to come.
        observations: Where calls are counted that end before there is one, if metrics are asked for.
    """

    def __init__(self, stall_seconds: float, observations: Observations | None) -> None:
        self._stall_seconds = stall_seconds
        self._observations = observations
        self._strangers: defaultdict[str, dict[asyncio.Timeout, None]] = defaultdict(dict)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Makes a stream of a call of one request."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        behavior: Behavior = behavior_of(handler)
        method = method_of(handler_call_details)
        read = self._read if rule_of(method) else self._read_of_stranger

        async def call(_: object, context: _Context) -> object:
            try:
                request = await read(context)
            except KvpoolError as error:
                if self._observations:
                    self._observations.rpc(method, CODES[type(error)].name, None)
                await abort(context, error, method)
            return await behavior(request, context)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(call, handler.request_deserializer, handler.response_serializer)

    async def _read(self, context: _Context, patience: asyncio.Timeout | None = None) -> object:
        """Reads the request.

        Raises:
            ExhaustedError: It does not come.
            InvalidArgumentError: It cannot be parsed, or the client is done and has sent none.
        """
        try:
            async with patience or asyncio.timeout(self._stall_seconds):
                request = await context.read()
        except TimeoutError:
            message = f"no request came in time, which is {self._stall_seconds:g} s at most"
            raise ExhaustedError("NOTHING_SENT", message) from None
        except DecodeError:
            raise malformed_error() from None
        if request is grpc.aio.EOF:
            raise InvalidArgumentError("message", "was not sent", reason="MALFORMED")
        return request

    async def _read_of_stranger(self, context: _Context) -> object:
        """As `_read`, of who has shown no token."""
        host = str(context.peer()).rpartition(":")[0]
        patience = asyncio.timeout(self._stall_seconds)
        self._strangers[host][patience] = None
        if sum(map(len, self._strangers.values())) > MAX_WAITING_STRANGERS:
            self._end_one()
        try:
            return await self._read(context, patience)
        finally:
            self._strangers[host].pop(patience, None)
            if not self._strangers[host]:
                del self._strangers[host]

    def _end_one(self) -> None:
        of_host = max(self._strangers.values(), key=len)
        longest = next(iter(of_host))
        del of_host[longest]
        if not longest.expired():
            longest.reschedule(asyncio.get_running_loop().time())
