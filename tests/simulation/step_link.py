"""Links of the simulated servers: the tap observes them as it does calls, and they break as connections of calls do."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import grpc

from kvpool.server.services.step_links import StepLink, StepLinks
from kvpool.v1 import step_pb2
from simulation.byte_streams import End
from simulation.grpc_call import Wire


class ObservedLink(StepLink):
    """A link of a server. Its steps and results are those of a call of Schedule."""

    def __init__(self, wire: Wire, links: StepLinks) -> None:
        super().__init__(links)
        self._wire = wire
        self._call: Any = None

    async def read(self) -> Any:
        """See `StepLink`."""
        message = await super().read()
        if isinstance(message, step_pb2.Step):
            if self._call is None:
                self._call = self._observed()
            self._wire.tap.received(self._call, message)
            self._break_by_chance()
        return message

    async def write(self, message: step_pb2.StepResult) -> None:
        """See `StepLink`."""
        self._wire.tap.answered(self._call, message)
        await super().write(message)
        self._break_by_chance()

    async def abort(self, code: grpc.StatusCode, text: str, details: Sequence[tuple[str, bytes]]) -> None:
        """See `StepLink`."""
        self._wire.tap.ended(self._call or self._observed(), (code, text, details))
        await super().abort(code, text, details)

    @property
    def _end(self) -> End:
        assert isinstance(self._transport, End)
        return self._transport

    def _observed(self) -> Any:
        """What the tap reads of a call."""
        server = SimpleNamespace(process=self._end.process)
        session_id = self.hello.steps.session_id if self.hello else ""
        client, method = self._end.peer.process, "/kvpool.v1.AllocatorService/Schedule"
        return SimpleNamespace(
            method=method, client=client, server=server, session_id=session_id, was_ended="", primary_term=0
        )

    def _break_by_chance(self) -> None:
        if self._wire.losses and self._wire.random.random() < self._wire.losses:
            self._end.connection.sever(self._wire.random)
