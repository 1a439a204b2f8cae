"""A connection to the directory of the cluster over the simulated network: a store in memory, on a host of its own.

A request that waits on a cut path, or whose answer is lost, has an unknown outcome: it may be applied much later.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvpool.server.cluster.directory import DirectoryError
from simulation.network import Network, Pipe
from simulation.virtual_loop import current_process
from support.memory_directory import MemoryDirectory, Store

DIRECTORY = "directory"
"""The host of the directory."""
_TIMEOUT_SECONDS = 1.0

_T = TypeVar("_T")


class DistantDirectory(MemoryDirectory):
    """See `MemoryDirectory`.

    Args:
        network: Carries requests and answers.
        store: The records.
    """

    def __init__(self, network: Network, store: Store) -> None:
        super().__init__(store)
        process = current_process()
        if process is None:
            raise RuntimeError("a process connects to the directory")
        self._there = Pipe(network, process.name, DIRECTORY)
        self._back = Pipe(network, DIRECTORY, process.name)

    async def _request(self, request: Callable[[], _T]) -> _T:
        answered: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def settle(answer: _T) -> None:
            if not answered.done():
                answered.set_result(answer)

        def apply() -> None:
            answer = request()
            self._back.send(lambda: settle(answer))

        self._there.send(apply)
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                return await answered
        except TimeoutError:
            raise DirectoryError(f"no answer in {_TIMEOUT_SECONDS:g} s") from None
