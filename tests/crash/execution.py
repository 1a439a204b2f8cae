"""Where a scheduler's steps are computed: in memory that only it watches over, or on the ranks of its pool."""

import time
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Final, Protocol

from crash.memory import Memory, StepLock
from kvpool.client import Session
from kvpool.core.ids import TableLease

AUTHKEY: Final = b"crash"

Cell = tuple[int, bytes]
"""A block, and what stands in it."""


@dataclass(slots=True)
class Task:
    """A request's part of a step: what must stand where it looks, then what it computes.

    Attributes:
        reads: What it looks at.
        writes: What it computes.
    """

    reads: list[Cell]
    writes: list[Cell]


@dataclass(slots=True)
class Outcome:
    """How a step went.

    Attributes:
        refused: Why it was not computed; empty if it was. LAPSED: the lease may be over. AWAY: a rank is not there.
            Else what a rank said.
        wrong: Cells that held something else, and what.
    """

    refused: str = ""
    wrong: list[tuple[int, bytes, bytes]] = field(default_factory=list)


class Executor(Protocol):
    """Computes steps."""

    def run(self, tasks: list[Task], seconds: float) -> Outcome:
        """Computes a step that takes so long."""


def compute(memory: Memory, tasks: list[Task]) -> Outcome:
    """Reads and writes a step's cells, request by request."""
    outcome = Outcome()
    for task in tasks:
        written = dict(task.writes)  # by a try that failed on another rank
        for block, expected in task.reads:
            found = memory.read(block)
            if found not in (expected, written.get(block)):
                outcome.wrong.append((block, found, expected))
        for block, cell in task.writes:
            memory.write(block, cell)
    return outcome


@dataclass(slots=True)
class OwnMemory:
    """Computes in the scheduler's own process, while its lease is sure to last.

    Attributes:
        memory: Where.
        lock: Held meanwhile.
        session: Whose lease it is.
    """

    memory: Memory
    lock: StepLock
    session: Session

    def run(self, tasks: list[Task], seconds: float) -> Outcome:
        """See `Executor`."""
        time.sleep(seconds)
        with self.lock.held():
            return compute(self.memory, tasks) if self.session.lease_left_seconds > 0 else Outcome("LAPSED")


class OnRanks:
    """Computes on every rank, each of which decides by its fence whether the step may run. Looks at no lease."""

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


def rank_path(folder: Path, rank: int) -> Path:
    """Where a rank takes steps."""
    return folder / f"rank-{rank}"


def rank_memory(rank: int, epoch: int) -> str:
    """Names what a rank holds in an epoch."""
    return f"rank-{rank}-{epoch}"
