"""Execution of a scheduler's steps: in its own process, or on the ranks of its pool."""

import time
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Final, Protocol

from crash.memory import Cells, Memory, StepLock
from kvpool.client import Session
from kvpool.core.ids import TableLease

AUTHKEY: Final = b"crash"

Cell = tuple[int, bytes]
"""A block id, and the content of its cell."""


@dataclass(slots=True)
class Task:
    """A request's part of a step: cells with their expected content, then cells with new content.

    Attributes:
        reads: Cells to read, with the expected content.
        writes: Cells to write.
    """

    reads: list[Cell]
    writes: list[Cell]


@dataclass(slots=True)
class Outcome:
    """Result of a step.

    Attributes:
        refused: Reason why the step did not run; empty if it ran. LAPSED: the lease may have expired. AWAY: a rank
            cannot be reached. Otherwise the reason of a rank.
        wrong: Cells with unexpected content: block id, actual and expected content.
    """

    refused: str = ""
    wrong: list[tuple[int, bytes, bytes]] = field(default_factory=list)


class Executor(Protocol):
    """Runs steps."""

    def run(self, tasks: list[Task], seconds: float) -> Outcome:
        """Runs a step of the given duration."""

    def close(self) -> None:
        """Ends with the session."""


def compute(memory: Cells, tasks: list[Task]) -> Outcome:
    """Reads and writes the cells of a step, request by request."""
    outcome = Outcome()
    for task in tasks:
        written = dict(task.writes)  # possibly written by an attempt that failed on another rank
        for block, expected in task.reads:
            found = memory.read(block)
            if found not in (expected, written.get(block)):
                outcome.wrong.append((block, found, expected))
        for block, cell in task.writes:
            memory.write(block, cell)
    return outcome


@dataclass(slots=True)
class OwnMemory:
    """Runs steps in the scheduler's own process, while its lease is certainly valid.

    Attributes:
        memory: The memory of the blocks.
        lock: Held during a step.
        session: The session with the lease.
    """

    memory: Memory
    lock: StepLock
    session: Session

    def run(self, tasks: list[Task], seconds: float) -> Outcome:
        """See `Executor`."""
        time.sleep(seconds)
        with self.lock.held():
            return compute(self.memory, tasks) if self.session.lease_left_seconds > 0 else Outcome("LAPSED")

    def close(self) -> None:
        """The memory stays."""


class OnRanks:
    """Runs steps on every rank. Each rank decides by its fence whether the step may run; the lease is not checked."""

    def __init__(self, folder: Path, num_ranks: int, lease: TableLease) -> None:
        self._paths = [rank_path(folder, rank) for rank in range(num_ranks)]
        self._lease = lease
        self._pipes: dict[Path, Connection[Any, Any]] = {}

    def run(self, tasks: list[Task], seconds: float) -> Outcome:
        """See `Executor`."""
        whole = Outcome()
        for path in self._paths:
            try:
                if path not in self._pipes:
                    self._pipes[path] = Client(str(path), "AF_UNIX", AUTHKEY)
                self._pipes[path].send((self._lease, tasks, seconds))
                outcome: Outcome = self._pipes[path].recv()
            except (OSError, EOFError):
                self._pipes.pop(path, None)
                time.sleep(0.02)
                return Outcome("AWAY")
            if outcome.refused:
                return outcome
            whole.wrong += outcome.wrong
        return whole

    def close(self) -> None:
        """Disconnects from the ranks."""
        for pipe in self._pipes.values():
            pipe.close()


def rank_path(folder: Path, rank: int) -> Path:
    """Socket on which a rank receives steps."""
    return folder / f"rank-{rank}"


def rank_memory(rank: int, epoch: int) -> str:
    """Name of a rank's memory in an epoch."""
    return f"rank-{rank}-{epoch}"
