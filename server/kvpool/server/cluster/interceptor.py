"""Refuses calls at a standby, and holds the answers of a primary back until they are confirmed."""

from collections.abc import Callable
from typing import Any, Final

import grpc

from kvpool.core.errors import KvpoolError, NotPrimaryError
from kvpool.server.cluster.gate import Gate
from kvpool.server.rpc import Context, Handler, Interceptor, abort, behavior_of, method_of, rewrapped
from kvpool.wire.channels import SHARD_KEY

_OPEN: Final = (
    "grpc.health.v1.Health/",
    "grpc.reflection.v1alpha.",
    "kvpool.v1.DirectoryService/",
    "kvpool.v1.AdminService/RemoveShard",
)
"""Answered by every server, without a confirmation."""
_UNCONFIRMED: Final = frozenset(
    f"kvpool.v1.AdminService/{name}" for name in ("ListPools", "ListSessions", "ListRequests", "ListBlocks", "HandOver")
)
"""Views for people, which a primary answers without a confirmation, and what it answers when it is one no longer."""


class OtherShardError(NotPrimaryError):
    """The call is for another shard, to which this server has belonged, or a server at its address."""

    def __init__(self, shard: str, own_shard: str) -> None:
        super().__init__((), 0, f"the call is for shard {shard!r}, the server belongs to {own_shard!r}")


class GateInterceptor(Interceptor):
    """The interceptor of a server of a shard. Those around it count and limit calls, and know nothing of the state.

    Args:
        shard: Name of the shard.
        gate: The gate.
        refusal: Returns the error for calls while this server is not the primary; None while it is.
    """

    def __init__(self, shard: str, gate: Gate, refusal: Callable[[], NotPrimaryError | None]) -> None:
        self._shard = shard
        self._gate = gate
        self._refusal = refusal

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Wraps the handlers of the services that need a primary."""
        method = method_of(details)
        if method.startswith(_OPEN):
            return handler
        behavior = behavior_of(handler)
        is_gated = method not in _UNCONFIRMED
        shard = next((value for key, value in details.invocation_metadata or () if key == SHARD_KEY), self._shard)

        async def call(request: object, context: Context) -> object:
            refusal = self._refusal() if shard == self._shard else OtherShardError(str(shard), self._shard)
            if refusal:
                await abort(context, refusal, method)
            if not is_gated:
                return await behavior(request, context)
            gated = _GatedContext(context, self._gate, method)
            response = await behavior(request, gated)
            if response is not None:  # streams write through the context
                await gated.passes()
            return response

        return rewrapped(handler, call)


class _GatedContext:
    """The context of a call. Messages that are sent with it pass the gate first, and so do errors: see `rpc.abort`."""

    def __init__(self, context: Any, gate: Gate, method: str) -> None:  # noqa: ANN401 - of grpc
        self._context = context
        self._gate = gate
        self._method = method
        self._arrived: int | None = gate.position

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of grpc
        return getattr(self._context, name)

    async def passes(self) -> None:
        """Waits at the gate, and ends the call with an error if it is not let out."""
        arrived, self._arrived = self._arrived, None
        try:
            await self._gate.wait(arrived)
        except KvpoolError as error:
            await abort(self._context, error, self._method)

    async def read(self) -> Any:  # noqa: ANN401 - of grpc
        message = await self._context.read()
        self._arrived = self._gate.position
        return message

    async def write(self, message: object) -> None:
        await self.passes()
        await self._context.write(message)
