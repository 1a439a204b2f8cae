"""Serves metrics over HTTP in its own threads. Peers are untrusted.

1. A peer that neither sends nor receives is disconnected, because each connection occupies a thread.
2. Requests are logged at debug level only, and write nothing to stderr except log records.
"""

import io
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, Metric, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvpool.wire.log_queue import dropped_log_records

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

IDLE_TIMEOUT_SECONDS: Final = 10.0
"""Maximum time for which a peer may neither send nor receive."""

_log = logging.getLogger("kvpool.metrics")


class MetricsServer:
    """Serves the metrics of a collector and of the process, from its creation until `stop`.

    Args:
        collector: The collector.
        host: IP address or host name to listen on.
        port: Port to listen on; 0 for a free one.

    Attributes:
        port: The port that the server listens on.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        for own in (ProcessCollector, PlatformCollector, GCCollector):
            own(registry=registry)
        registry.register(_LogCollector())
        registry.register(collector)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kind = type("_Server", (_HTTPServer,), {"address_family": family})
        self._http: WSGIServer = kind((address[0], port), _Handler)
        self._http.set_app(_guarded(make_wsgi_app(registry)))
        self.port: int = self._http.server_port
        self._thread = threading.Thread(target=self._http.serve_forever, name="kvpool-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops listening. Does not wait for responses that are being written."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _LogCollector(Collector):
    """The metric of the process's log."""

    def collect(self) -> Iterable[Metric]:
        """Yields the number of dropped records."""
        text = "Log records dropped because the reader of stderr was too slow."
        yield CounterMetricFamily("kvpool_log_records_dropped", text, dropped_log_records())


class _HTTPServer(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002 - socketserver's
        """Logs a connection that broke or was disconnected."""
        _log.debug("connection ended", extra={"error": repr(sys.exception())})


class _Handler(WSGIRequestHandler):
    timeout = IDLE_TIMEOUT_SECONDS

    def log_message(self, *_: object) -> None:
        """Does not log requests."""

    def get_stderr(self) -> Any:  # noqa: ANN401 - wsgiref's type is its own
        """Discards tracebacks, for example of a peer that does not read."""
        return io.StringIO()


def _guarded(app: "WSGIApplication") -> "WSGIApplication":
    """Wraps an app so that errors are logged and answered with a status."""

    def call(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        start: Callable[..., object] = start_response
        try:
            return app(environ, start_response)
        except TimeoutError as error:
            _log.warning("scrape failed", extra={"error": str(error)})
            start("503 Service Unavailable", [])
        except Exception:  # noqa: BLE001 - the boundary: a bug must end this scrape alone, and is logged
            _log.exception("bug", extra={"method": "scrape"})
            start("500 Internal Server Error", [])
        return []

    return call
