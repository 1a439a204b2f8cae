"""Serves metrics by HTTP, in threads of its own, to a network on which anything may come.

1. A peer that says nothing, or takes nothing, is let go: each has a thread.
2. Nothing that a peer does is worth a line above debug, or anything on stderr but a line of the log.
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

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

SILENCE_SECONDS: Final = 10.0
"""How long a peer may say or take nothing."""

_log = logging.getLogger("kvpool.metrics")


class MetricsServer:
    """Serves a collector's metrics, and the process's own, from its making until it is stopped.

    Args:
        collector: What there is to tell.
        host: Where to listen: an address or a name.
        port: Likewise; 0 for a free one.

    Attributes:
        port: The port.

    Raises:
        OSError: The address cannot be had.
    """

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        for own in (ProcessCollector, PlatformCollector, GCCollector):
            own(registry=registry)
        registry.register(collector)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kind = type("_Server", (_HTTPServer,), {"address_family": family})
        self._http: WSGIServer = kind((address[0], port), _Handler)
        self._http.set_app(_guarded(make_wsgi_app(registry)))
        self.port: int = self._http.server_port
        self._thread = threading.Thread(target=self._http.serve_forever, name="kvpool-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops listening; answers that are being written are not waited for."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _HTTPServer(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002 - socketserver's
        """Takes note of a connection that broke, or was let go."""
        _log.debug("connection ended", extra={"error": repr(sys.exception())})


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_SECONDS

    def log_message(self, *_: object) -> None:
        """Writes nothing of a request."""

    def get_stderr(self) -> Any:  # noqa: ANN401 - wsgiref's type is its own
        """What else would hold a trace when a peer takes nothing."""
        return io.StringIO()


def _guarded(app: "WSGIApplication") -> "WSGIApplication":
    """Answers for an app that fails, and logs why."""

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
