"""Serves /metrics: copies figures on the server's event loop, a moment's work, and writes the text in a thread.

1. Nothing but the loop reads the core, so a scrape sees all pools as they were at one moment.
2. Nothing is worked out until somebody asks.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.registry import Collector

from kvpool.wire.metrics_http import MetricsServer

SCRAPE_SECONDS: Final = 5.0
"""How long a scrape waits for its turn on the event loop."""


class LoopCollector(Collector):
    """Collects from state that belongs to an event loop.

    Args:
        loop: The loop.
        sample: Copies the figures; called on the loop. What it returns makes the metrics, elsewhere.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sample: Callable[[], Callable[[], Iterable[Metric]]]) -> None:
        self._loop = loop
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics as of now.

        Raises:
            TimeoutError: The loop is busy for too long; the scrape fails, which is what it should say.
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
        """Names nothing in advance: registering must not wait for the loop that registers."""
        return ()


class Exporter:
    """The HTTP server of a server's metrics, in threads of its own.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        sample: As of `LoopCollector`.

    Raises:
        OSError: The address cannot be had.
    """

    def __init__(self, host: str, port: int, sample: Callable[[], Callable[[], Iterable[Metric]]]) -> None:
        self._http = MetricsServer(LoopCollector(asyncio.get_running_loop(), sample), host, port)
        self.address = f"{host}:{self._http.port}"
        """Where it listens, the port that was free included."""

    async def stop(self) -> None:
        """Stops listening; the loop goes on meanwhile, as a scrape in flight waits for it."""
        await asyncio.to_thread(self._http.stop)
