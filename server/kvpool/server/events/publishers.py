"""The publishers of all pools of a server, with one pair of endpoints per pool.

A pool looks like one vLLM engine: it has its own endpoint, its own numbers from 0, and its own replay socket. With one
socket for all pools, a subscriber of one pool would see gaps in the numbers and could not request that pool's
replay. An endpoint that is connected to is shared by all pools; there, subscribers distinguish pools by topic.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Final, TypeAlias

import zmq
import zmq.asyncio

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName
from kvpool.server.events.config import EventsConfig, is_bound, numbered
from kvpool.server.events.log import LiveEventLog
from kvpool.server.events.publisher import Confirmed, EventPublisher, PublisherSockets, at_once
from kvpool.server.limits.streams import ChunkTurns
from kvpool.wire.descriptor_reserve import has_free_files

_MAX_REQUEST_BYTES: Final = 1024
_MIN_FREE_FILES: Final = 16
"""Free file descriptors below which connections are dropped."""
_CHECK_SECONDS: Final = 0.05
_REFUSAL_SECONDS: Final = 1.0
"""Time for which connections are refused after others were dropped."""

_Socket: TypeAlias = "zmq.Socket[bytes] | zmq.asyncio.Socket"

_log = logging.getLogger("kvpool.server")


class EventPublishers:
    """The publishers of a server, in one event loop.

    Attributes:
        by_pool: Publishers by pool, in the order in which the pools were added.
        confirmed: What each message waits for; set before the first pool is added.
    """

    def __init__(self, settings: EventsConfig, boot_id: str) -> None:
        self.by_pool: dict[PoolName, EventPublisher] = {}
        self._settings = settings
        self._boot_id = boot_id
        self.confirmed: Confirmed = at_once
        self._context = zmq.Context()
        self._async_context = zmq.asyncio.Context(shadow=self._context)
        self._turns = ChunkTurns()
        self._opened: dict[int, PublisherSockets] = {}
        self._numbers: dict[PoolName, int] = {}
        self._released: dict[PoolName, int] = {}  # endpoint indices of removed pools, the first removed first
        self._tasks: dict[PoolName, list[asyncio.Task[None]]] = {}
        self._flood_watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Opens the endpoints of the first pool, or of all pools named in the settings, and watches for floods.

        Raises:
            OSError: An endpoint cannot be opened.
        """
        try:
            for number in range(len(self._settings.pools) or 1):
                self._open(number)
        except OSError:
            self._close()
            raise
        if list(self._bound_sockets()):
            self._flood_watch = asyncio.create_task(self._end_floods(), name="end_floods")
            self._flood_watch.add_done_callback(_log_bug)

    def add(self, pool: KVCacheManager, log: LiveEventLog) -> None:
        """Starts the publisher of a pool that makes events and is to be published, unless it is running."""
        name = pool.config.name
        if name in self.by_pool or not pool.config.makes_events:
            return
        number = self._number_for(name)
        if number is None:
            return
        try:
            sockets = self._opened.get(number) or self._open(number)
        except OSError as error:  # the pool works without, and EventService still serves its events
            _log.error("events not published", extra={"pool": name, "error": str(error)})
            return
        self._numbers[name] = number
        self._released = {other: released for other, released in self._released.items() if released != number}
        publisher = self.by_pool[name] = EventPublisher(
            pool, log, self._settings, self._boot_id, sockets, turns=self._turns, confirmed=self.confirmed
        )
        works = (publisher.publish(), publisher.serve_requests())
        tasks = self._tasks[name] = [asyncio.create_task(work, name=name) for work in works]
        for task in tasks:
            task.add_done_callback(_log_bug)
        addresses = [socket.get_string(zmq.LAST_ENDPOINT) for socket in (sockets.publish, sockets.replay) if socket]
        _log.info("events published", extra={"pool": name, "addresses": addresses})

    def remove(self, name: PoolName) -> None:
        """Stops the publisher of a removed pool. The next pool of this name, or a new one, takes its endpoints."""
        if self.by_pool.pop(name, None):
            self._released[name] = self._numbers.pop(name)
            for task in self._tasks.pop(name):
                task.cancel()

    async def stop(self) -> None:
        """Stops all publishers and closes their sockets. Messages that are not sent yet are dropped."""
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        if self._flood_watch:
            tasks.append(self._flood_watch)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close()

    async def _end_floods(self) -> None:
        """Drops the connections of all bound endpoints whenever few file descriptors are left. Runs indefinitely.

        ZeroMQ has no maximum of connections, and accepts them until no descriptor is left for anything else.
        """
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if has_free_files(_MIN_FREE_FILES):
                continue
            dropped = list(self._bound_sockets())
            _log.warning("event subscribers dropped", extra={"addresses": [endpoint for _, endpoint in dropped]})
            for socket, endpoint in dropped:
                socket.unbind(endpoint)
            while dropped:
                await asyncio.sleep(_REFUSAL_SECONDS)
                dropped = [(socket, endpoint) for socket, endpoint in dropped if not _try_bind(socket, endpoint)]

    def _bound_sockets(self) -> Iterator[tuple[_Socket, str]]:
        for sockets in self._opened.values():
            for socket in (sockets.publish if is_bound(self._settings.endpoint) else None, sockets.replay):
                if socket:
                    yield socket, socket.get_string(zmq.LAST_ENDPOINT)

    def _number_for(self, name: PoolName) -> int | None:
        """Index of a pool's endpoints: its former ones, else those unused for longest. None if it is not published."""
        if self._settings.pools or not self._released:
            return self._settings.number_of(name, len(self._numbers))
        return self._released.get(name, next(iter(self._released.values())))

    def _close(self) -> None:
        for sockets in self._opened.values():
            sockets.publish.close(linger=0)
            if sockets.replay:
                sockets.replay.close(linger=0)
        self._context.term()

    def _open(self, number: int) -> PublisherSockets:
        """Opens the endpoints with this index.

        Raises:
            OSError: An endpoint cannot be opened.
        """
        settings, replay = self._settings, None
        endpoint = settings.endpoint
        with contextlib.ExitStack() as undo:
            try:
                publish = undo.enter_context(self._context.socket(zmq.PUB))
                publish.sndhwm = settings.buffer_batches
                if is_bound(endpoint):
                    endpoint = numbered(endpoint, number)
                    _bind(publish, endpoint)
                else:
                    publish.connect(endpoint)
                if settings.replay_endpoint:
                    endpoint = numbered(settings.replay_endpoint, number)
                    replay = undo.enter_context(self._async_context.socket(zmq.ROUTER))
                    replay.router_mandatory = True  # reports disconnected and slow peers as errors
                    replay.maxmsgsize = _MAX_REQUEST_BYTES
                    _bind(replay, endpoint)
            except zmq.ZMQError as error:
                raise OSError(f"cannot publish on {endpoint}: {zmq.strerror(error.errno or 0)}") from error
            undo.pop_all()
        sockets = self._opened[number] = PublisherSockets(publish, replay)
        return sockets


def _bind(socket: _Socket, endpoint: str) -> None:
    socket.ipv6 = "[" in endpoint
    socket.bind(endpoint)


def _try_bind(socket: _Socket, endpoint: str) -> bool:
    try:
        _bind(socket, endpoint)
    except zmq.ZMQError:  # for example, another process has taken the port
        return False
    return True


def _log_bug(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.critical("bug: events no longer published", extra={"pool": task.get_name()}, exc_info=error)
