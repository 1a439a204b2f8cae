"""The status page: its files, the figures as JSON, and a stream of them. Runs in the event loop of the HTTP server.

1. All pages are read-only, and open to everyone who reaches the port, as `/metrics` is.
2. All clients share one copy of the figures. See `StatusCollector`.
3. The page loads nothing from other hosts, and runs no script but its own.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any, Final

from aiohttp import web

from kvpool.server.http.collector import Copied
from kvpool.wire.http_server import ANSWER_SECONDS, Handler, text_response
from kvpool.wire.readable import message_json

MAX_VIEWERS: Final = 16
"""Maximum number of streams, fewer than connections, so that there is room for scrapes."""
PARTS: Final = ("server", "pools", "blocks", "sessions", "members", "history", "events")
"""The parts of the page: each is an event of the stream, and a page of JSON."""
_API: Final = "/api/v2"
_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/status.css": ("status.css", "text/css"),
    "/status.js": ("status.js", "text/javascript"),
    "/figures.js": ("figures.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    f"{_API}/openapi.json": ("openapi.json", "application/json"),
}
_HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
_BUSY_PAUSE_SECONDS: Final = 1.0
"""Pause of a stream while the server is too busy to make a copy."""

_log = logging.getLogger("kvpool.metrics")


class StatusPages:
    """The pages of one server.

    Args:
        copy: Copies the figures. A TimeoutError means that the server does not answer.
    """

    def __init__(self, copy: Callable[[], Awaitable[Copied]]) -> None:
        self._copy = copy
        self._newest: dict[str, bytes] = {}
        self._due_seconds = 0.0
        self._copying: asyncio.Task[None] | None = None
        self._num_viewers = 0

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handler of each path."""
        parts = {f"{_API}/{name}.json": self._part_handler(name) for name in PARTS}
        static = {path: _file_handler(name, content_type) for path, (name, content_type) in _FILES.items()}
        return {f"{_API}/stream": self._stream, **parts, **static}

    def _part_handler(self, name: str) -> Handler:
        async def answer(_: web.BaseRequest) -> web.StreamResponse:
            content = (await self._parts())[name]
            return web.Response(body=content, headers={"Content-Type": "application/json", **_HEADERS})

        return answer

    async def _parts(self) -> dict[str, bytes]:
        """The newest copy, as JSON."""
        if asyncio.get_running_loop().time() >= self._due_seconds:
            if self._copying is None or self._copying.done():
                self._copying = asyncio.create_task(self._refresh())
                # Its error counts as seen, also if all who waited for it have left.
                self._copying.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(self._copying)  # others may wait for it, too
        return self._newest

    async def _refresh(self) -> None:
        start_seconds = asyncio.get_running_loop().time()
        copied = await self._copy()
        self._newest = {name: _encoded(part) for name, part in copied.parts.items()}
        self._due_seconds = start_seconds + copied.next_seconds

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._num_viewers >= MAX_VIEWERS:
            return text_response(503, f"{MAX_VIEWERS} streams are open, the maximum")
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "X-Content-Type-Options": "nosniff",
                **_HEADERS,
                "Connection": "close",
            }
        )
        self._num_viewers += 1
        try:
            await response.prepare(request)
            if request.method == "GET":
                await self._send_all(request, response)
        except ConnectionError:
            pass
        except TimeoutError:  # the peer does not read
            if request.transport:
                request.transport.abort()
        except Exception:  # noqa: BLE001 - the boundary: a bug must end this stream alone, and is logged
            _log.exception("bug", extra={"method": request.path})
        finally:
            self._num_viewers -= 1
        return response

    async def _send_all(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Sends the parts that have changed, until the peer leaves."""
        sent: dict[str, bytes] = {}
        while request.transport:
            try:
                parts = await self._parts()
            except TimeoutError:
                await self._send(response, b": the server is busy\n\n")
                await asyncio.sleep(_BUSY_PAUSE_SECONDS)
                continue
            changed = {name: content for name, content in parts.items() if sent.get(name) != content}
            sent.update(changed)
            events = [b"event: %b\ndata: %b\n\n" % (name.encode(), content) for name, content in changed.items()]
            await self._send(response, b"".join(events))
            await asyncio.sleep(max(self._due_seconds - asyncio.get_running_loop().time(), 0.01))

    async def _send(self, response: web.StreamResponse, content: bytes) -> None:
        async with asyncio.timeout(ANSWER_SECONDS):
            await response.write(content)


def _file_handler(name: str, content_type: str) -> Handler:
    """Returns a handler that sends a file of the page, or that the peer has it."""
    content = (files("kvpool.server.http") / "static" / name).read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"Content-Type": f"{content_type}; charset=utf-8", "ETag": etag, **_HEADERS}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, headers=headers)

    return answer


def _encoded(part: Any) -> bytes:  # noqa: ANN401 - a JSON value, with messages
    return json.dumps(part, ensure_ascii=False, separators=(",", ":"), default=message_json).encode(errors="replace")
