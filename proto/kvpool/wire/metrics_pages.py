"""The pages that every process serves: metrics for Prometheus, health and readiness.

Metrics are made for at most `SCRAPES_PER_SECOND`, in all formats together. More scrapes get the newest page of their
format.
"""

import asyncio
import gzip
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, Metric, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvpool.wire.http_server import Handler, text_response
from kvpool.wire.log_queue import dropped_log_records

SCRAPES_PER_SECOND: Final = 5.0
MAX_AGE_SECONDS: Final = 1.0
"""Age from which a page is made again on credit, so that no format takes the scrapes of the others."""
_OPENMETRICS: Final = "application/openmetrics-text"

_log = logging.getLogger("kvpool.metrics")


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a process is ready.

    Attributes:
        is_ready: Whether it is.
        detail: Why it is not ready, or what is wrong although it is; empty for nothing.
    """

    is_ready: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of metrics, or why there is none."""

    content: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


class MetricsPages:
    """`/metrics`, `/healthz` and `/readyz`. Used by the event loop of one `HttpServer`.

    Args:
        collector: The collector; metrics of the process are added.
        readiness: Returns whether the process is ready. Called in a thread, so it may wait; a TimeoutError means that
            the process does not answer.
    """

    def __init__(self, collector: Collector, readiness: Callable[[], Readiness]) -> None:
        self._registry = CollectorRegistry()
        for own in (ProcessCollector, PlatformCollector, GCCollector):
            own(registry=self._registry)
        self._registry.register(LogCollector())
        self._registry.register(collector)
        self._readiness = readiness
        self._check: asyncio.Task[Readiness] | None = None
        self._newest: dict[tuple[bool, bool], _Scrape] = {}  # by whether it is OpenMetrics, and compressed
        self._budget = _Budget()
        self._rendering = asyncio.Lock()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handler of each path."""
        return {"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._ready}

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        is_openmetrics = _OPENMETRICS in request.headers.get("Accept", "")
        is_zipped = "gzip" in request.headers.get("Accept-Encoding", "")
        encode, content_type = choose_encoder(f"{_OPENMETRICS};version=1.0.0" if is_openmetrics else "")
        form = is_openmetrics, is_zipped
        newest = self._newest.get(form)
        if newest is None or (newest.page.done() and self._budget.spend(newest.start_seconds)):
            task = asyncio.create_task(self._scrape(encode, content_type, is_zipped=is_zipped))
            newest = self._newest[form] = _Scrape(task, time.monotonic())
        page = await asyncio.shield(newest.page)  # others may wait for it, too
        headers = {"Content-Type": page.content_type, "Vary": "Accept, Accept-Encoding"}
        if is_zipped and page.status == 200:  # noqa: PLR2004 - OK
            headers["Content-Encoding"] = "gzip"
        return web.Response(status=page.status, body=page.content, headers=headers)

    async def _scrape(
        self, encode: Callable[[CollectorRegistry], bytes], content_type: str, *, is_zipped: bool
    ) -> _Page:
        def render() -> bytes:
            page = encode(self._registry)
            return gzip.compress(page, compresslevel=1) if is_zipped else page

        try:
            async with self._rendering:
                return _Page(await asyncio.to_thread(render), content_type)
        except TimeoutError as error:
            _log.warning("scrape failed", extra={"error": str(error)})
            return _Page(f"{error}\n".encode(), status=503)
        except Exception:  # noqa: BLE001 - the boundary: a bug must end this scrape alone, and is logged
            _log.exception("bug", extra={"method": "scrape"})
            return _Page(b"the scrape failed; see the log\n", status=500)

    async def _found(self) -> Readiness:
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(asyncio.to_thread(self._readiness))
        return await asyncio.shield(self._check)

    async def _health(self, _: web.BaseRequest) -> web.Response:
        await self._found()
        return text_response(200, "ok")

    async def _ready(self, _: web.BaseRequest) -> web.Response:
        found = await self._found()
        if not found.is_ready:
            return text_response(503, found.detail)
        return text_response(200, f"ok; {found.detail}" if found.detail else "ok")


@dataclass(frozen=True, slots=True)
class _Scrape:
    """The newest scrape of a format.

    Attributes:
        page: What it makes.
        start_seconds: When it began, in monotonic time.
    """

    page: asyncio.Task[_Page]
    start_seconds: float


class _Budget:
    """How many scrapes may begin now. Scrapes of old pages overdraw it, at most by one per format."""

    def __init__(self) -> None:
        self._scrapes = SCRAPES_PER_SECOND
        self._time_seconds = time.monotonic()

    def spend(self, last_seconds: float) -> bool:
        """Takes one scrape of a format whose last one began at a time; returns False if there is none left."""
        now = time.monotonic()
        earned = (now - self._time_seconds) * SCRAPES_PER_SECOND
        self._scrapes = min(self._scrapes + earned, SCRAPES_PER_SECOND)
        self._time_seconds = now
        if self._scrapes < 1 and now - last_seconds < MAX_AGE_SECONDS:
            return False
        self._scrapes -= 1
        return True


class LogCollector(Collector):
    """The metric of the process's log."""

    def collect(self) -> Iterable[Metric]:
        """Yields the number of dropped records."""
        text = "Log records dropped because the reader of stderr was too slow."
        yield CounterMetricFamily("kvpool_log_records_dropped", text, dropped_log_records())
