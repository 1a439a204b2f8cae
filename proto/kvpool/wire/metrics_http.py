"""Serves metrics and health over HTTP, in an event loop of its own thread. Peers are untrusted.

1. The number of connections is bounded. A new one displaces the oldest that has sent no request, or else the oldest
   that does not read its answer. While the answers of all are made, none is accepted.
2. A peer has limited time to send its request, and to receive the answer.
3. A connection is accepted even if the process has no other file descriptor left.
4. Metrics are made for at most `SCRAPES_PER_SECOND` in each format. More scrapes get the newest page of their format.
"""

import asyncio
import contextlib
import gzip
import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from typing import Any, Final

from prometheus_client import CollectorRegistry, GCCollector, Metric, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvpool.wire.descriptor_reserve import DescriptorReserve
from kvpool.wire.log_queue import dropped_log_records

MAX_CONNECTIONS: Final = 32
SCRAPES_PER_SECOND: Final = 5.0
REQUEST_SECONDS: Final = 5.0
"""Maximum time in which a peer sends its request."""
ANSWER_SECONDS: Final = 10.0
"""Maximum time in which a peer receives the answer."""

_MAX_REQUEST_BYTES: Final = 16_384
_BACKLOG: Final = 128
_ACCEPTED_TOGETHER: Final = 16
_NUM_RESERVED: Final = 4
"""Descriptors kept for connections."""
_ACCEPT_PAUSE_SECONDS: Final = 0.02
"""Pause after each `_ACCEPTED_TOGETHER` connections, so that a flood does not occupy the interpreter."""

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


class MetricsServer:
    """Serves `/metrics`, `/healthz` and `/readyz` from its creation until `stop`.

    Args:
        collector: The collector; metrics of the process are added.
        host: IP address or host name to listen on.
        port: Port to listen on; 0 for a free one.
        readiness: Returns whether the process is ready. Called in a thread, so it may wait; a TimeoutError means that
            the process does not answer.

    Attributes:
        port: The port that the server listens on.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(self, collector: Collector, host: str, port: int, readiness: Callable[[], Readiness]) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._listener = socket.create_server((str(address[0]), port), family=family, backlog=_BACKLOG)
        self._listener.settimeout(0)
        self.port: int = self._listener.getsockname()[1]
        self._reserve = DescriptorReserve(_NUM_RESERVED)
        self._pages = _Pages(collector, readiness)
        self._open: set[asyncio.Task[Any]] = set()
        self._awaiting_peer: dict[Any, bool] = {}
        """Whether the request has arrived of those that wait for their peer, the longest-waiting first."""
        self._has_room = asyncio.Event()
        self._stopped = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvpool-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops listening. Does not wait for responses that are being written."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        with self._listener, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._stopped.wait()
        accepting.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(_ACCEPTED_TOGETHER):
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:  # for example, no file descriptor is left
                    _log.debug("connection ended", extra={"error": repr(error)})
                    await self._accept_with_reserve()
                    break
                await self._take(connection)
            await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)

    async def _accept_with_reserve(self) -> None:
        with contextlib.suppress(OSError), self._reserve.released():
            connection, _ = self._listener.accept()
            connection.settimeout(0)
            await self._take(connection)

    async def _take(self, connection: socket.socket) -> None:
        """Serves a connection, as soon as there is room for it."""
        if len(self._open) >= MAX_CONNECTIONS:
            await asyncio.sleep(0)  # those accepted just now read the requests that have arrived
        while len(self._open) >= MAX_CONNECTIONS and not self._awaiting_peer:
            self._has_room.clear()
            await self._has_room.wait()
        if len(self._open) >= MAX_CONNECTIONS:
            displaced = min(self._awaiting_peer, key=self._awaiting_peer.__getitem__)
            displaced.cancel()
            self._forget(displaced)
        task = asyncio.create_task(self._answer(connection))
        self._open.add(task)
        self._awaiting_peer[task] = False
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._open.discard(task)
        self._awaiting_peer.pop(task, None)
        self._has_room.set()
        self._reserve.fill()

    async def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    head = await _read_head(connection)
                with self._not_displaced():
                    answer = await self._pages.answer(head)
                async with asyncio.timeout(ANSWER_SECONDS):
                    await asyncio.get_running_loop().sock_sendall(connection, answer)
            except OSError as error:
                _log.debug("connection ended", extra={"error": repr(error)})

    @contextlib.contextmanager
    def _not_displaced(self) -> Iterator[None]:
        """Keeps the connection of the current task while its answer is made."""
        task = asyncio.current_task()
        self._awaiting_peer.pop(task, None)
        yield
        self._awaiting_peer[task] = True
        self._has_room.set()


class _Pages:
    """The pages of the server. Used by its event loop only."""

    def __init__(self, collector: Collector, readiness: Callable[[], Readiness]) -> None:
        self._registry = CollectorRegistry()
        for own in (ProcessCollector, PlatformCollector, GCCollector):
            own(registry=self._registry)
        self._registry.register(LogCollector())
        self._registry.register(collector)
        self._readiness = readiness
        self._check: asyncio.Task[Readiness] | None = None
        self._formats = {(text, is_zipped): _Format() for text in (False, True) for is_zipped in (False, True)}
        """By whether it is OpenMetrics, and whether it is compressed."""
        self._rendering = asyncio.Lock()

    async def answer(self, head: bytes) -> bytes:
        """Answers a request."""
        first, _, rest = head.partition(b"\r\n")
        try:
            method, target, _ = first.decode("latin-1").split(" ")
            headers = parse_headers(io.BytesIO(rest))
        except (ValueError, HTTPException):
            return _response(HTTPStatus.BAD_REQUEST, "not a request of HTTP/1")
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
        path = target.partition("?")[0]
        if path == "/metrics":
            is_zipped = "gzip" in headers.get("Accept-Encoding", "")
            answer = await self._metrics(headers.get("Accept", ""), is_zipped=is_zipped)
        elif path in ("/healthz", "/readyz"):
            answer = await self._health(is_readiness=path == "/readyz")
        else:
            answer = _response(HTTPStatus.NOT_FOUND, "the pages are /metrics, /healthz and /readyz")
        return answer if method == "GET" else answer[: answer.index(b"\r\n\r\n") + 4]

    async def _metrics(self, accept: str, *, is_zipped: bool) -> bytes:
        is_openmetrics = _OPENMETRICS in accept
        encode, content_type = choose_encoder(f"{_OPENMETRICS};version=1.0.0" if is_openmetrics else "")
        form = self._formats[is_openmetrics, is_zipped]
        if form.scrape is None or (form.scrape.done() and form.spend_budget()):
            form.scrape = asyncio.create_task(self._scrape(encode, content_type, is_zipped=is_zipped))
        return await asyncio.shield(form.scrape)  # others may wait for it, too

    async def _scrape(
        self, encode: Callable[[CollectorRegistry], bytes], content_type: str, *, is_zipped: bool
    ) -> bytes:
        def render() -> bytes:
            page = encode(self._registry)
            return gzip.compress(page, compresslevel=1) if is_zipped else page

        try:
            async with self._rendering:
                page = await asyncio.to_thread(render)
        except TimeoutError as error:
            _log.warning("scrape failed", extra={"error": str(error)})
            return _response(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception:  # noqa: BLE001 - the boundary: a bug must end this scrape alone, and is logged
            _log.exception("bug", extra={"method": "scrape"})
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR, "the scrape failed; see the log")
        return _response(HTTPStatus.OK, page, content_type, *(["Content-Encoding: gzip"] if is_zipped else []))

    async def _health(self, *, is_readiness: bool) -> bytes:
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(asyncio.to_thread(self._readiness))
        try:
            found = await asyncio.shield(self._check)
        except TimeoutError as error:
            return _response(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if not is_readiness:
            return _response(HTTPStatus.OK, "ok")
        if not found.is_ready:
            return _response(HTTPStatus.SERVICE_UNAVAILABLE, found.detail)
        return _response(HTTPStatus.OK, f"ok; {found.detail}" if found.detail else "ok")


class _Format:
    """A format of the metrics.

    Attributes:
        scrape: The newest scrape, complete or not.
    """

    def __init__(self) -> None:
        self.scrape: asyncio.Task[bytes] | None = None
        self._budget_scrapes = SCRAPES_PER_SECOND
        self._budget_time_seconds = time.monotonic()

    def spend_budget(self) -> bool:
        """Takes one scrape from the budget; returns False if there is none left."""
        now = time.monotonic()
        earned = (now - self._budget_time_seconds) * SCRAPES_PER_SECOND
        self._budget_scrapes = min(self._budget_scrapes + earned, SCRAPES_PER_SECOND)
        self._budget_time_seconds = now
        if self._budget_scrapes < 1:
            return False
        self._budget_scrapes -= 1
        return True


class LogCollector(Collector):
    """The metric of the process's log."""

    def collect(self) -> Iterable[Metric]:
        """Yields the number of dropped records."""
        text = "Log records dropped because the reader of stderr was too slow."
        yield CounterMetricFamily("kvpool_log_records_dropped", text, dropped_log_records())


async def _read_head(connection: socket.socket) -> bytes:
    """Reads the request line and the headers.

    Raises:
        ConnectionError: The peer closed the connection or sends too much.
    """
    loop = asyncio.get_running_loop()
    head = b""
    while b"\r\n\r\n" not in head:
        part = await loop.sock_recv(connection, 4096)
        if not part or len(head) + len(part) > _MAX_REQUEST_BYTES:
            raise ConnectionError("the request is incomplete" if not part else "the request is too long")
        head += part
    return head


def _response(
    status: HTTPStatus, body: bytes | str, content_type: str = "text/plain; charset=utf-8", *headers: str
) -> bytes:
    content = f"{body}\n".encode() if isinstance(body, str) else body
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(content)}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content
