"""Connections over which schedulers send steps to ranks: one per process, lost with either end or when cut."""

import asyncio
from collections import defaultdict
from random import Random

from kvpool.core.ids import TableLease
from simulation.gpu import StepWork
from simulation.network import Network, Pipe
from simulation.rank_process import GpuStep, RankProcess
from simulation.scheduler_parts import EngineError
from simulation.virtual_loop import Process

_PATIENCE_SECONDS = 3.0
_RETRY_SECONDS = 0.05
_TRIES = 40
_LOST = "LOST"


class RankLines:
    """All connections between schedulers and ranks.

    Attributes:
        unassigned: Connections of a scheduler that is not started yet.
    """

    def __init__(self, network: Network, random: Random) -> None:
        self.network = network
        self.random = random
        self.ranks: dict[int, tuple[Process, RankProcess]] = {}
        self.unassigned = Lines(self, None)

    def add(self, rank: int, process: Process, ranks: RankProcess) -> None:
        """Registers the current process of a rank."""
        self.ranks[rank] = (process, ranks)

    def to_all(self, process: Process) -> "Lines":
        """Connects a scheduler."""
        return Lines(self, process)


class Lines:
    """The connections of one scheduler process."""

    def __init__(self, lines: RankLines, process: Process | None) -> None:
        self._lines = lines
        self._process = process
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._has_failed = False

    async def run(self, lease: TableLease, work: StepWork) -> None:
        """See `Ranks`."""
        await asyncio.gather(*[self._run_on(rank, lease, work) for rank in self._lines.ranks])

    async def _run_on(self, rank: int, lease: TableLease, work: StepWork) -> None:
        async with self._turns[rank]:  # steps run in order, as on a device
            refusal = "NOT_READY"
            for _ in range(_TRIES):
                if self._has_failed or refusal != "NOT_READY":
                    break
                refusal = await self._try(rank, lease, work)
                if not refusal:
                    return
                if refusal == "NOT_READY":
                    await asyncio.sleep(_RETRY_SECONDS)
            self._has_failed = True
        raise EngineError(f"rank {rank}: {refusal}")

    async def _try(self, rank: int, lease: TableLease, work: StepWork) -> str:
        process = self._process
        target, ranks = self._lines.ranks[rank]
        if process is None or target.is_dead:
            return _LOST
        network = self._lines.network
        there, back = Pipe(network, process.name, target.name), Pipe(network, target.name, process.name)
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        step = GpuStep(lease, work, lambda what: back.send(lambda: _settle(answered, what)))
        there.send(lambda: target.run(ranks.submit, process, step))
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                return await answered
        except TimeoutError:
            return _LOST


def _settle(future: "asyncio.Future[str]", what: str) -> None:
    if not future.done():
        future.set_result(what)
