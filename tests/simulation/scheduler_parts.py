"""What a simulated scheduler works on and with: users' jobs, the ranks, who looks, and what it has on disk."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from kvpool.client import aio
from kvpool.client.errors import KvpoolError
from kvpool.client.request import Request
from kvpool.core.ids import TableLease
from simulation.gpu import Computation, extend_contents


class EngineError(Exception):
    """The engine cannot go on: the process ends, and another takes its place."""


@dataclass(slots=True, eq=False)
class Job:
    """What a user wants computed.

    Attributes:
        name: Its name.
        token_ids: Prompt, and what was generated so far.
        num_tokens: Tokens when it is done.
        salt: Its cache salt; empty for none.
    """

    name: str
    token_ids: list[int]
    num_tokens: int
    salt: str = ""

    @property
    def is_done(self) -> bool:
        """Whether all is generated."""
        return len(self.token_ids) >= self.num_tokens


@dataclass(slots=True, eq=False)
class Running:
    """A job whose request the session knows."""

    job: Job
    request: Request
    contents: list[list[int]]
    is_delayed: bool = False
    """Whether its newest full blocks are yet to be cached."""
    aborted: bool = False


class Ranks(Protocol):
    """How steps get to the ranks."""

    async def run(self, lease: TableLease, work: tuple[Computation, ...]) -> None:
        """Runs a step on all ranks.

        Raises:
            EngineError: One was lost, or refuses it.
        """


class Watcher(Protocol):
    """Who looks whether what a scheduler believes is so."""

    def settled(self, session: aio.AsyncSession, running: list[Request]) -> None:
        """All that the session asked for has been answered."""

    def session_ended(self, session: aio.AsyncSession, error: KvpoolError) -> None:
        """The scheduler was told that its session has ended."""


@dataclass(slots=True)
class Stored:
    """What a scheduler has on disk, for the process after it.

    Attributes:
        session_id: The session; empty for none.
        sequence: Of the newest step that was answered.
        computed: Tokens that all ranks have computed of each request that runs.
        count: Requests that were made.
    """

    session_id: str = ""
    sequence: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    count: int = 0


@dataclass(slots=True)
class SchedulerSettings:
    """What a scheduler process is started with."""

    pool: str
    address: str
    lease_seconds: float
    jobs: list[Job]
    random: Random
    ranks: Ranks
    watcher: Watcher
    trace: Callable[..., None]
    quota: tuple[int, int] = (0, 0)
    """Blocks that it is always to have, and most that it may."""
    max_running: int = 3
    deadline_seconds: float = 4.0
    stored: Stored = field(default_factory=Stored)


def computation_of(running: Running, start: int) -> Computation:
    request = running.request
    extend_contents(running.contents, request.token_ids, _salt_number(running.job.salt))
    end = request.num_computed_tokens
    return Computation(
        request.request_id,
        start,
        end,
        tuple(map(tuple, request.block_ids)),
        tuple(tuple(of_group[:end]) for of_group in running.contents),
    )


def _salt_number(salt: str) -> int:
    """A number for a salt, the same in every run."""
    return int.from_bytes(salt.encode(), "big")
