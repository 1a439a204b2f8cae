"""A call on its way through the guard."""

import asyncio
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from kvpool.core.errors import KvpoolError
from kvpool.server.auth.tokens import Grant
from kvpool.server.limits.streams import Context
from kvpool.server.metrics.observations import Observations

if TYPE_CHECKING:
    from kvpool.server.tracing import Tracer

_CODES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


class GuardedCall:
    """A call. Use with `with`: the end of the block counts the call, and releases what would hold its messages.

    Args:
        method: The called method, `package.Service/Method`.
        context: Its context.
        observations: Counts the call.
        tracer: Traces it; None for none.

    Attributes:
        grant: Permissions of its token; None if the call or the server needs none.
        grants: All permissions at the time of authentication.
        refusal: Why the call has no permission; None if it has, or needs none.
    """

    __slots__ = ("_observations", "_started_seconds", "_tracer", "context", "grant", "grants", "method", "refusal")

    def __init__(
        self, method: str, context: Context, observations: Observations, tracer: "Tracer | None" = None
    ) -> None:
        self.method = method
        self.context = context
        self.grant: Grant | None = None
        self.grants: tuple[Grant, ...] = ()
        self.refusal: KvpoolError | None = None
        self._observations = observations
        self._started_seconds: float | None = None
        self._tracer = tracer
        if tracer:
            tracer.begin_call(self.header)

    def header(self, key: str, default: str = "") -> str:
        """What the client sent with the call as this key, which is the first if there are several."""
        metadata: Any = self.context.invocation_metadata() or ()
        return next((str(value) for name, value in metadata if name == key), default)

    def start(self) -> None:
        """Begins the duration of a call with one request, which has arrived, and one response."""
        self._started_seconds = time.perf_counter()
        if self._tracer:
            self._tracer.message_arrived()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _forget_frames(error)
        seconds = time.perf_counter() - self._started_seconds if self._started_seconds is not None else None
        code = self._code(error)
        self._observations.rpc(self.method, code, seconds)
        if self._tracer and seconds is not None:
            self._tracer.end_call(self.method, code)

    def _code(self, error: BaseException | None) -> str:
        """Name of the final status; a status that was never set is OK."""
        if isinstance(error, asyncio.CancelledError):
            return grpc.StatusCode.CANCELLED.name
        if error and not isinstance(error, grpc.aio.AbortError):
            return grpc.StatusCode.UNKNOWN.name
        code: Any = self.context.code()
        return code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code or 0, "UNKNOWN")


def _forget_frames(error: BaseException | None) -> None:
    """Drops the tracebacks of an exception and of those that led to it, as their frames hold messages.

    gRPC's state of a call that was aborted, and the exception, refer to each other. They would keep the messages until
    a garbage collection, or until the server ends if they are frozen before. The frames are not cleared, as those of
    other calls that the exception has ended may be among them, and still run.
    """
    while error:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
