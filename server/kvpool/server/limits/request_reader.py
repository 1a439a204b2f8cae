"""Reads the messages of calls: single requests with a time limit, and all with limits on their size.

gRPC itself waits for a single request indefinitely, before any code of the server sees the call. To a request that
cannot be parsed it would answer UNKNOWN without details, and log a traceback.
"""

import asyncio
import inspect
from collections import defaultdict
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from kvpool.core.errors import ExhaustedError, InvalidArgumentError, KvpoolError
from kvpool.server.auth.permissions import rule_of
from kvpool.server.limits.config import Limits
from kvpool.server.limits.messages import parser_of
from kvpool.server.metrics.observations import Observations
from kvpool.server.rpc import Behavior, Context, Handler, Interceptor, abort, behavior_of, method_of, rewrapped
from kvpool.wire.errors import CODES, malformed_error

MAX_PENDING_OPEN_CALLS: Final = 32
"""Maximum number of calls that need no token and whose request has not arrived. Each can hold a partial message."""


class RequestReader(Interceptor):
    """An interceptor that serves calls with one request as streams from which it reads one message.

    Clients that need no token could occupy all calls that the server accepts, with a new call for each one that is
    ended. Therefore only a few such calls may wait for their request. One more call ends the call that has waited
    longest, among those of the host with the most waiting calls. A host that delays its requests loses calls of its
    own, and the health probe of another host is not affected.

    Args:
        limits: Limits of the server. `stall_seconds` is the maximum time until a request arrives.
        observations: Counts calls that end without a request.
    """

    def __init__(self, limits: Limits, observations: Observations) -> None:
        self._limits = limits
        self._stall_seconds = limits.stall_seconds
        self._observations = observations
        self._pending_by_host: defaultdict[str, dict[asyncio.Timeout, None]] = defaultdict(dict)

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Turns a call with one request into a stream, and limits its messages."""
        behavior: Behavior = behavior_of(handler)
        method = method_of(details)
        parser = parser_of(handler, method, self._limits)
        if handler.request_streaming:
            served = behavior if inspect.isasyncgenfunction(behavior) else _without_garbage(behavior)
            return rewrapped(handler, served, parser)
        served = _without_garbage(behavior)
        read = self._read if rule_of(method) else self._read_without_token

        async def call(_: object, context: Context) -> object:
            try:
                answer = served(await read(context), context)  # in no variable: see `_without_garbage`
            except KvpoolError as error:
                self._observations.rpc(method, CODES[type(error)].name, None)
                await abort(context, error, method)
            return await answer

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(call, parser, handler.response_serializer)

    async def _read(self, context: Context, deadline: asyncio.Timeout | None = None) -> object:
        """Reads the request.

        Raises:
            ExhaustedError: The request is too large, or does not arrive in time, or before too many other calls wait
                for theirs.
            InvalidArgumentError: The request cannot be parsed, or the client closed its side without sending one.
        """
        try:
            async with deadline or asyncio.timeout(self._stall_seconds):
                request = await context.read()
        except TimeoutError:
            message = f"no request arrived within {self._stall_seconds:g} s, or before too many calls waited for theirs"
            raise ExhaustedError("NOTHING_SENT", message) from None
        except DecodeError:
            raise malformed_error() from None
        if request is grpc.aio.EOF:
            raise InvalidArgumentError("message", "was not sent", reason="MALFORMED")
        return request

    async def _read_without_token(self, context: Context) -> object:
        """Reads the request of a call that needs no token."""
        host = str(context.peer()).rpartition(":")[0]
        deadline = asyncio.timeout(self._stall_seconds)
        self._pending_by_host[host][deadline] = None
        if sum(map(len, self._pending_by_host.values())) > MAX_PENDING_OPEN_CALLS:
            self._end_one()
        try:
            return await self._read(context, deadline)
        finally:
            self._pending_by_host[host].pop(deadline, None)
            if not self._pending_by_host[host]:
                del self._pending_by_host[host]

    def _end_one(self) -> None:
        pending = max(self._pending_by_host.values(), key=len)
        oldest = next(iter(pending))
        del pending[oldest]
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())


def _without_garbage(behavior: Behavior) -> Behavior:
    """Releases the messages of a call that fails.

    gRPC's state of a call that was aborted, and the exception, refer to each other. Through the frames of the exception
    they would keep its messages until a garbage collection, or until the server ends if they are frozen before.
    """

    async def call(request: object, context: Context) -> object:
        try:
            return await behavior(request, context)
        except BaseException as error:
            del request
            _forget_frames(error)
            raise

    return call


def _forget_frames(error: BaseException | None) -> None:
    """Drops the tracebacks of an exception and of those that led to it.

    The frames are not cleared, as those of other calls that the exception has ended may be among them, and still run.
    """
    while error:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
