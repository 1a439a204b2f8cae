"""The core gives every answer of the reference while it is repeatedly killed and restored from its journal."""

import time
from pathlib import Path
from typing import TypeVar

from conformance.client_systems import ClientSystem
from conformance.golden import Driver, Schedule
from kvpool.client import connect
from kvpool.client.transports.embedded import EmbeddedTransport
from kvpool.core.commands import Command
from kvpool.core.steps.columns import Step, StepResult
from support.journal import begin, journal_in, kill
from support.state import with_message

CHANGES_A_LIFE = 211
_ResultT = TypeVar("_ResultT")


class MortalTransport(EmbeddedTransport):
    """Dies after a fixed number of changes, every second time without a final snapshot."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._changes = 0
        self.lives = 0
        self._live()

    async def apply(self, session_id: str, step: Step) -> StepResult:
        self._changes += 1
        if self._changes % CHANGES_A_LIFE == 0:
            self.die()
        return await super().apply(session_id, step)

    def _execute(self, command: Command[_ResultT]) -> _ResultT:
        return super()._execute(with_message(command))

    def die(self) -> None:
        if self.lives % 2:
            self._journal.close()
        else:
            kill(self._journal)
        self._live()

    def _live(self) -> None:
        self._journal = journal_in(self._folder)
        assert not self._journal.recovery.dropped, self._journal.recovery.detail
        begin(self._journal, time.monotonic())
        self._state = self._journal.state
        self.lives += 1


def test_the_core_answers_as_the_reference_across_restarts(schedule: Schedule, tmp_path: Path) -> None:
    with connect("embedded:") as client:
        transport = client._service = MortalTransport(tmp_path)
        system = ClientSystem(client, schedule.pool_config("journal"))
        Driver(system, schedule).run()
        transport.die()
        system.close()
        assert transport.lives > 2
        kill(transport._journal)
