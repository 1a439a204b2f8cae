"""Collects metrics of state that belongs to an event loop: the loop copies the figures, a thread makes the metrics.

1. Only the event loop reads the core, so a scrape shows all pools at the same moment.
2. Figures are computed per scrape only.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.registry import Collector

SCRAPE_SECONDS: Final = 5.0
"""Maximum time that a scrape waits for the event loop."""


class LoopCollector(Collector):
    """Collects from state that belongs to an event loop.

    Args:
        loop: The loop.
        sample: Copies the figures; called on the loop. It returns a function that makes the metrics in a thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sample: Callable[[], Callable[[], Iterable[Metric]]]) -> None:
        self._loop = loop
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        """Yields all current metrics.

        Raises:
            TimeoutError: The loop is busy for too long, and the scrape fails.
        """

        async def sample() -> Callable[[], Iterable[Metric]]:
            return self._sample()

        waiting = asyncio.run_coroutine_threadsafe(sample(), self._loop)
        try:
            render = waiting.result(SCRAPE_SECONDS)
        except TimeoutError:
            raise TimeoutError(f"the event loop was busy for {SCRAPE_SECONDS:g} s") from None
        yield from render()

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, because the loop itself registers this collector and cannot wait for itself."""
        return ()
