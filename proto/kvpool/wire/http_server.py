"""Serves pages over HTTP, in an event loop of its own thread, so that pages never block it. Peers are untrusted.

1. The number of connections is bounded. A new one displaces the oldest that has sent no request, or else the oldest
   that does not read its answer. While the answers of all are made, none is accepted.
2. A peer has limited time to send its request, and to receive the answer.
3. A connection is accepted even if the process has no other file descriptor left.
4. A page is made in limited time, or as often as its handler allows. See `MetricsPages`.
5. A request over loopback must name this machine. Otherwise a web page that a user opens could read all pages, through
   a name of its own that it lets stand for 127.0.0.1 (DNS rebinding).

aiohttp parses the requests and writes the answers. `Acceptor` accepts the connections.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kvpool.wire.acceptor import ACCEPT_PAUSE_SECONDS, Acceptor, bound_listeners
from kvpool.wire.address import is_loopback_ip

MAX_CONNECTIONS: Final = 32
REQUEST_SECONDS: Final = 5.0
"""Maximum time in which a peer sends its request."""
ANSWER_SECONDS: Final = 10.0
"""Maximum time in which a peer receives the answer, or a part of an answer that has no end."""

_MAX_LINE_BYTES: Final = 16_384
_MAX_HEADERS: Final = 64

Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
"""Makes the answer to a request with the method GET or HEAD. May send it itself."""

_log = logging.getLogger("kvpool.metrics")
_unwritten_log = logging.Logger("aiohttp", logging.CRITICAL + 1)  # noqa: LOG001 - no part of the tree, so not written
"""What aiohttp logs about requests that are no HTTP: a peer could fill the log."""


class HttpServer:
    """Serves pages from its creation until `stop`.

    Args:
        host: IP address or host name to listen on; on all addresses of a name, which requests over loopback may give.
        port: Port to listen on; 0 for a free one.
        pages: The handler of each path. Called in the server's event loop.

    Attributes:
        port: The port that the server listens on.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(self, host: str, port: int, pages: Mapping[str, Handler]) -> None:
        self._listeners = bound_listeners(host, port)
        self.port: int = self._listeners[0].getsockname()[1]
        self._pages = pages
        self._own_names = frozenset(name.lower() for name in ("localhost", host, socket.gethostname()))
        self._stopped = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvpool-http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops listening. Does not wait for responses that are being written."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        peers = _Peers(self._pages, self._own_names)
        peers.acceptor.start(self._listeners)
        await self._stopped.wait()
        peers.acceptor.close()
        peers.abort_all()
        await asyncio.sleep(0)  # the connections close


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection.

    Attributes:
        transport: The connection.
        is_busy: Whether its answer is made.
        has_asked: Whether it has sent a request.
        timer: Ends a connection whose answer is not read.
    """

    transport: asyncio.Transport
    is_busy: bool = False
    has_asked: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def awaits_answer(self) -> bool:
        """Whether it has not read the answer to its request."""
        return self.has_asked and self.transport.get_write_buffer_size() > 0

    def stop_timer(self) -> None:
        """Gives the peer time without a limit."""
        if self.timer:
            self.timer.cancel()
            self.timer = None


class _Peers(web.Server):
    """The connections. Used by the server's event loop only.

    Attributes:
        acceptor: Accepts them.
    """

    def __init__(self, pages: Mapping[str, Handler], own_names: Collection[str]) -> None:
        super().__init__(
            self._answer,
            handler_cancellation=True,
            access_log=None,
            logger=_unwritten_log,
            keepalive_timeout=REQUEST_SECONDS,
            lingering_time=0,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            max_headers=_MAX_HEADERS,
        )
        self._pages = pages
        self._own_names = own_names
        self._peers: dict[RequestHandler, _Peer] = {}  # the longest-waiting first
        self._has_room = asyncio.Event()
        self.acceptor = Acceptor(self, admit=self._admit)

    def abort_all(self) -> None:
        """Ends all connections at once."""
        for peer in self._peers.values():
            peer.stop_timer()
            peer.transport.abort()

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """See aiohttp."""
        super().connection_made(handler, transport)
        self._peers[handler] = _Peer(transport)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """See aiohttp."""
        super().connection_lost(handler, exc)
        peer = self._peers.pop(handler, None)
        if peer:
            peer.stop_timer()
        self._has_room.set()
        self.acceptor.reserve.fill()

    async def _admit(self) -> None:
        """Waits until there is room for a connection, or makes room."""
        if len(self._peers) >= MAX_CONNECTIONS:
            await asyncio.sleep(ACCEPT_PAUSE_SECONDS)  # the requests of those accepted just now arrive
        while len(self._peers) >= MAX_CONNECTIONS:
            waiting = [(handler, peer) for handler, peer in self._peers.items() if not peer.is_busy]
            if waiting:
                handler, displaced = min(waiting, key=lambda each: each[1].awaits_answer)
                del self._peers[handler]
                displaced.stop_timer()
                displaced.transport.abort()
                return
            self._has_room.clear()
            await self._has_room.wait()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        peer = self._peers.get(handler)
        if peer is None:  # displaced
            return web.Response(status=503)
        with self._busy(handler, peer):
            response = await self._made(request)
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    @contextlib.contextmanager
    def _busy(self, handler: RequestHandler, peer: _Peer) -> Iterator[None]:
        """Keeps a connection while its answer is made. Then the peer has limited time to receive it."""
        peer.stop_timer()
        peer.is_busy = peer.has_asked = True
        try:
            yield
        finally:
            peer.is_busy = False
            if self._peers.pop(handler, None):
                self._peers[handler] = peer
                peer.timer = self._loop.call_later(ANSWER_SECONDS, peer.transport.abort)
            self._has_room.set()

    async def _made(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self._is_ours(request):
            return text_response(421, "the host in the request is no name of this machine")
        if request.method not in ("GET", "HEAD"):
            return text_response(405, "only GET and HEAD", headers={"Allow": "GET, HEAD"})
        handler = self._pages.get(request.path)
        if handler is None:
            return text_response(404, "no such page")
        try:
            return await handler(request)
        except ConnectionError:
            raise
        except TimeoutError as error:
            return text_response(503, str(error))
        except Exception:  # noqa: BLE001 - the boundary: a bug must end this answer alone, and is logged
            _log.exception("bug", extra={"method": request.path})
            return text_response(500, "the page failed; see the log")

    def _is_ours(self, request: web.BaseRequest) -> bool:
        """Whether the request came from elsewhere, or its host is an IP address or a name of this machine."""
        address = request.transport.get_extra_info("sockname") if request.transport else None
        if not address or not is_loopback_ip(address[0]):
            return True
        if "Host" not in request.headers:  # no browser
            return True
        host = _name_in(request.headers["Host"])
        return host in self._own_names or host.endswith(".localhost") or _is_ip(host)


def _name_in(host: str) -> str:
    """The name or IP address in a header `Host`, without its port; empty if it is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def text_response(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer that is one line of text."""
    return web.Response(status=status, text=f"{text}\n", headers=headers)
