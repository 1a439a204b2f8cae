"""The state that a primary replicates and that a standby executes records on, with its journal."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvpool.core.state import State
from kvpool.server.journal.frames import Frame
from kvpool.server.journal.journal import Journal
from kvpool.server.journal.records import execute_record
from kvpool.server.journal.snapshot import load_snapshot


class Clock(Protocol):
    """The clock of a server's leases."""

    def now_seconds(self) -> float:
        """The time."""


class ReplicatedState:
    """The state of one server of a shard.

    Args:
        journal: The journal, recovered, whose state it is.
        make_state: Makes an empty state.
        clock: The clock of the state's leases.

    Attributes:
        journal: The journal.
        state: The state.
        snapshot_lock: Held while a snapshot of the state is read.
        clock: The clock of the state's leases.
        primary_seconds: Time of the newest change of a standby, on the clock of its primary.
    """

    def __init__(self, journal: Journal, make_state: Callable[[], State], clock: Clock) -> None:
        self.journal = journal
        self.state = journal.state
        self.snapshot_lock = journal.snapshot_lock
        self.clock = clock
        self.primary_seconds = 0.0
        self._make_state = make_state

    @property
    def was_recovered(self) -> bool:
        """Whether this process began with the state of its journal."""
        return bool(self.journal.recovery.last_number) and not self.journal.recovery.dropped

    def execute(self, frame: Frame) -> None:
        """Executes a record of the primary, and writes it to the journal as it was received.

        Raises:
            DamageError: It is malformed.
            MismatchError: It has another result than at the primary.
            KvpoolError: It is refused, which it was not at the primary.
        """
        record = execute_record(self.state, frame.payload)
        self.journal.write(frame.encoded, record.command)
        self.primary_seconds = record.now_seconds

    async def load(self, frames: list[Frame]) -> State:
        """Makes the state of a snapshot, in a thread, beside this one.

        Raises:
            DamageError: It is malformed, or of an impossible state.
        """
        state = self._make_state()
        await asyncio.to_thread(load_snapshot, state, iter(frames))
        return state

    def replace(self, state: State) -> None:
        """Replaces the state as a whole; its journal begins again."""
        self.state.replace(state)
        self.journal.restart()

    def clear(self) -> None:
        """Replaces the state with an empty one."""
        self.replace(self._make_state())
