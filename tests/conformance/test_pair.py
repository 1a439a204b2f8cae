"""A primary and its standby give every answer of the reference, with a takeover every 50 changes."""

import time
from typing import TypeVar

from conformance.client_systems import ClientSystem
from conformance.golden import Driver, Schedule
from kvpool.client import connect
from kvpool.client.transports.embedded import EmbeddedTransport
from kvpool.core.commands import AttachStream, Command, RenewLeases
from kvpool.core.state import State
from kvpool.core.steps.columns import Step, StepResult
from kvpool.server.journal.frames import HEAD_BYTES
from kvpool.server.journal.records import encode_record, execute_record
from support.replicas import encoded
from support.state import with_message

CHANGES_A_TERM = 50
_ResultT = TypeVar("_ResultT")


class PairTransport(EmbeddedTransport):
    """Executes each command at a primary, and its record at a standby, which becomes the primary after some changes.

    Attributes:
        num_takeovers: Number of terms before this one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._standby = State()
        self._changes = 0
        self.num_takeovers = 0

    async def apply(self, session_id: str, step: Step) -> StepResult:
        self._changes += 1
        if self._changes % CHANGES_A_TERM == 0:
            self.take_over()
        return await super().apply(session_id, step)

    def take_over(self) -> None:
        """Makes the standby the primary, and the primary its standby, as a server does after it became the primary."""
        assert encoded(self._state) == encoded(self._standby)
        self._state, self._standby = self._standby, self._state
        self._execute(RenewLeases())
        for _, session in self._state.sessions:
            self._state.execute(AttachStream(session.session_id), time.monotonic())  # the clients connect again
        self.num_takeovers += 1

    def _execute(self, command: Command[_ResultT]) -> _ResultT:
        now_seconds, command = time.monotonic(), with_message(command)
        result = self._state.execute(command, now_seconds)
        if command.recorded:
            execute_record(self._standby, encode_record(command, now_seconds, result)[HEAD_BYTES:])
        return result


def test_a_pair_answers_as_the_reference(schedule: Schedule) -> None:
    with connect("embedded:") as client:
        transport = client._service = PairTransport()
        system = ClientSystem(client, schedule.pool_config("pair"))
        Driver(system, schedule).run()
        transport.take_over()
        system.close()
        assert transport.num_takeovers > 2
