"""Serves /metrics. Figures are copied on the server's event loop, and a thread renders the text.

1. Only the event loop reads the core, so a scrape shows all pools at the same moment.
2. Figures are computed per scrape only.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.registry import Collector

from kvpool.wire.metrics_http import MetricsServer

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


class Exporter:
    """The HTTP server of the metrics, with its own threads.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        sample: See `LoopCollector`.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(self, host: str, port: int, sample: Callable[[], Callable[[], Iterable[Metric]]]) -> None:
        self._http = MetricsServer(LoopCollector(asyncio.get_running_loop(), sample), host, port)
        self.address = f"{host}:{self._http.port}"
        """The listening address, with the actual port."""

    async def stop(self) -> None:
        """Stops listening. The loop keeps running meanwhile, as a scrape in progress waits for it."""
        await asyncio.to_thread(self._http.stop)
