"""Reads the request of a call with a single one, within a time limit.

gRPC itself waits for a single request indefinitely, before any code of the server sees the call. To a request that
cannot be parsed it would answer UNKNOWN without details, and log a traceback.
"""

import asyncio
from collections import defaultdict
from typing import Final

import grpc

from kvpool.core.errors import ExhaustedError, InvalidArgumentError
from kvpool.server.auth.permissions import rule_of
from kvpool.server.guard.call import GuardedCall

MAX_PENDING_OPEN_CALLS: Final = 32
"""Maximum number of calls that need no token and whose request has not arrived. Each can hold a partial message."""


class RequestReader:
    """The reader of one server.

    Clients that need no token could occupy all calls that the server accepts, with a new call for each one that is
    ended. Therefore only a few such calls may wait for their request. One more call ends the call that has waited
    longest, among those of the host with the most waiting calls. A host that delays its requests loses calls of its
    own, and the health probe of another host is not affected.

    Args:
        stall_seconds: Maximum time until a request arrives.
    """

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._pending_by_host: defaultdict[str, dict[asyncio.Timeout, None]] = defaultdict(dict)

    async def read(self, call: GuardedCall) -> object:
        """Reads the request.

        Raises:
            ExhaustedError: The request is too large, or does not arrive in time, or before too many other calls wait
                for theirs.
            InvalidArgumentError: The client closed its side without sending a request.
            DecodeError: The request cannot be parsed.
        """
        deadline = asyncio.timeout(self._stall_seconds)
        if rule_of(call.method):
            return await self._read(call, deadline)
        host = str(call.context.peer()).rpartition(":")[0]
        self._pending_by_host[host][deadline] = None
        if sum(map(len, self._pending_by_host.values())) > MAX_PENDING_OPEN_CALLS:
            self._end_one()
        try:
            return await self._read(call, deadline)
        finally:
            self._pending_by_host[host].pop(deadline, None)
            if not self._pending_by_host[host]:
                del self._pending_by_host[host]

    async def _read(self, call: GuardedCall, deadline: asyncio.Timeout) -> object:
        try:
            async with deadline:
                request = await call.context.read()
        except TimeoutError:
            message = f"no request arrived within {self._stall_seconds:g} s, or before too many calls waited for theirs"
            raise ExhaustedError("NOTHING_SENT", message) from None
        if request is grpc.aio.EOF:
            raise InvalidArgumentError("message", "was not sent", reason="MALFORMED")
        return request

    def _end_one(self) -> None:
        pending = max(self._pending_by_host.values(), key=len)
        oldest = next(iter(pending))
        del pending[oldest]
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())
