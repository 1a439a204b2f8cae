"""Refuses calls at a standby, and holds the answers of a primary back until they are confirmed."""

from collections.abc import Callable
from typing import Any, Final

from kvpool.core.errors import KvpoolError, NotPrimaryError
from kvpool.server.cluster.gate import Gate
from kvpool.server.guard.call import GuardedCall
from kvpool.server.guard.statuses import abort
from kvpool.server.limits.streams import Context

_OPEN: Final = (
    "grpc.health.v1.Health/",
    "grpc.reflection.v1alpha.",
    "kvpool.v1.DirectoryService/",
)
"""Answered by every server, without a confirmation."""
_UNCONFIRMED: Final = frozenset(
    f"kvpool.v1.AdminService/{name}"
    for name in (
        *("ListPools", "ListSessions", "ListRequests", "ListBlocks", "ExplainMisses", "ExplainPrompt"),
        "HandOver",
    )
)
"""Views for people, which a primary answers without a confirmation, and what it answers when it is one no longer."""


class PrimaryCheck:
    """The check of a server of a shard.

    Args:
        gate: The gate.
        refusal: Returns the error for calls while this server is not the primary; None while it is.
    """

    def __init__(self, gate: Gate, refusal: Callable[[], NotPrimaryError | None]) -> None:
        self._gate = gate
        self._refusal = refusal

    def admit(self, call: GuardedCall) -> None:
        """Lets a call through, and puts the gate in front of its answers.

        Raises:
            NotPrimaryError: This server is not the primary.
        """
        if call.method.startswith(_OPEN):
            return
        if refusal := self._refusal():
            raise refusal
        if call.method not in _UNCONFIRMED:
            call.context = GatedContext(call.context, self._gate, call.method)  # type: ignore[assignment]  # as one


class GatedContext:
    """The context of a call. Messages that are sent with it pass the gate first, and so do errors: see `abort_with`."""

    def __init__(self, context: Context, gate: Gate, method: str) -> None:
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
        """Reads a message; its answer may need a mark that was sent after it arrived."""
        message = await self._context.read()
        self._arrived = self._gate.position
        return message

    async def write(self, message: object) -> None:
        """Writes a message once the gate lets it out."""
        await self.passes()
        await self._context.write(message)
