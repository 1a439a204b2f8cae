"""Parts of a simulated scheduler: jobs, the ranks, its observer, and its data on disk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from kvpool.client import aio
from kvpool.client.request import Request
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import TableLease
from simulation.gpu import Computation, StepWork, extend_contents


class EngineError(Exception):
    """The engine cannot continue: the process ends, and a successor starts."""


@dataclass(slots=True, eq=False)
class Job:
    """A user's request.

    Attributes:
        name: Its name.
        token_ids: Prompt, and the tokens generated so far.
        num_tokens: Number of tokens when it is done.
        salt: Its cache salt; empty for none.
    """

    name: str
    token_ids: list[int]
    num_tokens: int
    salt: str = ""

    @property
    def is_done(self) -> bool:
        """Whether all tokens are generated."""
        return len(self.token_ids) >= self.num_tokens


@dataclass(slots=True, eq=False)
class Running:
    """A job with a request in the session."""

    job: Job
    request: Request
    contents: list[list[int]]

    is_delayed: bool = False
    """Whether its newest full blocks are not cached yet."""
    aborted: bool = False
    num_admissions: int = 0
    num_run_tokens: int = 0
    """Tokens whose contents are in its blocks: the hit, and what all ranks have computed."""
    tables: list[list[int]] = field(default_factory=list)
    """The blocks that the answers gave it, per group, of a session with slots in reserve."""

    def take_blocks(self, new_blocks: Sequence[Sequence[int]]) -> None:
        """Adds blocks to the tables."""
        for table, blocks in zip(self.tables, new_blocks, strict=True):
            table.extend(blocks)

    def keep_contents(self, num_tokens: int) -> None:
        """Forgets the contents after the first tokens, which will be computed with the engine's weights of then."""
        for of_group in self.contents:
            del of_group[num_tokens:]


class Ranks(Protocol):
    """Sends steps to the ranks."""

    async def run(self, lease: TableLease, work: StepWork) -> None:
        """Runs a step on all ranks.

        Raises:
            EngineError: A rank was lost, or refused the step.
        """


class Watcher(Protocol):
    """Compares a scheduler's view with the server's state."""

    def settled(self, session: aio.AsyncSession, running: list[Running]) -> None:
        """Called when all requests of the session have been answered."""

    def session_ended(self, session: aio.AsyncSession, error: KvpoolError) -> None:
        """Called when the scheduler learns that its session has ended."""


@dataclass(slots=True)
class SchedulerSettings:
    """Settings of a scheduler process."""

    pool: str
    address: str
    lease_seconds: float
    jobs: list[Job]
    random: Random
    ranks: Ranks
    watcher: Watcher
    trace: Callable[..., None]
    quota: tuple[int, int] = (0, 0)
    """Minimum and maximum number of blocks of its session."""
    max_running: int = 3
    max_in_flight: int = 1
    """Most steps that it launches before the first of them has run."""
    reserve_tokens: int = 0
    deadline_seconds: float = 4.0
    weights: int = 1
    """Number of the weights that the engine loads, also after a restart."""


def computation_of(running: Running, start: int, weights: int) -> Computation:
    request = running.request
    extend_contents(running.contents, request.token_ids, _salt_number(running.job.salt), weights)
    end = request.num_computed_tokens
    return Computation(
        request.request_id,
        start,
        end,
        tuple(map(tuple, running.tables or request.block_ids)),
        tuple(tuple(of_group[:end]) for of_group in running.contents),
    )


def _salt_number(salt: str) -> int:
    """A number for a salt that is the same in every run."""
    return int.from_bytes(salt.encode(), "big")
