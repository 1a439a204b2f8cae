"""The publishers of all pools of a server, a pair of endpoints a pool.

A pool looks like one vLLM engine: an endpoint, numbers from 0 and a replay socket of its own. With one socket for all,
a subscriber of one pool would see gaps in the numbers, and could not say whose replay it wants. Where the endpoint is
connected to, all pools connect to the same one: that is where their topics tell them apart.
"""

import asyncio
import contextlib
import logging
from typing import Final

import zmq
import zmq.asyncio

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName
from kvpool.server.events.config import EventsConfig, is_bound, numbered
from kvpool.server.events.log import LiveEventLog
from kvpool.server.events.publisher import EventPublisher, PublisherSockets
from kvpool.server.limits.streams import ChunkTurns

_MAX_REQUEST_BYTES: Final = 1024

_log = logging.getLogger("kvpool.server")


class EventPublishers:
    """Publishers by pool. Belongs to one event loop.

    Attributes:
        by_pool: The publishers, in the order their pools came.
    """

    def __init__(self, settings: EventsConfig, boot_id: str) -> None:
        self.by_pool: dict[PoolName, EventPublisher] = {}
        self._settings = settings
        self._boot_id = boot_id
        self._context = zmq.Context()
        self._async_context = zmq.asyncio.Context(shadow=self._context)
        self._turns = ChunkTurns()
        self._opened: dict[int, PublisherSockets] = {}
        self._numbers: dict[PoolName, int] = {}
        self._left: dict[PoolName, int] = {}  # numbers of pools that were removed, the first removed first
        self._tasks: dict[PoolName, list[asyncio.Task[None]]] = {}

    def start(self) -> None:
        """Opens the endpoints of the first pool, or of those that the settings name.

        Raises:
            OSError: One cannot be had.
        """
        try:
            for number in range(len(self._settings.pools) or 1):
                self._open(number)
        except OSError:
            self._close()
            raise

    def add(self, pool: KVCacheManager, log: LiveEventLog) -> None:
        """Begins to publish a pool, if it makes events and is to be published. Does nothing if it is published."""
        name = pool.config.name
        if name in self.by_pool or not pool.config.makes_events:
            return
        number = self._number_for(name)
        if number is None:
            return
        try:
            sockets = self._opened.get(number) or self._open(number)
        except OSError as error:  # the pool serves all the same, and its events can be watched
            _log.error("events not published", extra={"pool": name, "error": str(error)})
            return
        self._numbers[name] = number
        self._left = {other: left for other, left in self._left.items() if left != number}
        publisher = self.by_pool[name] = EventPublisher(
            pool, log, self._settings, self._boot_id, sockets, turns=self._turns
        )
        works = (publisher.publish(), publisher.serve_requests())
        tasks = self._tasks[name] = [asyncio.create_task(work, name=name) for work in works]
        for task in tasks:
            task.add_done_callback(_log_end)
        addresses = [socket.get_string(zmq.LAST_ENDPOINT) for socket in (sockets.publish, sockets.replay) if socket]
        _log.info("events published", extra={"pool": name, "addresses": addresses})

    def remove(self, name: PoolName) -> None:
        """Ends the publisher of a pool that is no more. Its endpoints are for the next: of its name, or a new one."""
        if self.by_pool.pop(name, None):
            self._left[name] = self._numbers.pop(name)
            for task in self._tasks.pop(name):
                task.cancel()

    async def stop(self) -> None:
        """Ends all publishers and closes their sockets; what a subscriber has not taken yet is dropped."""
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close()

    def _number_for(self, name: PoolName) -> int | None:
        """Which endpoints a pool gets: its own again, else those longest unused. So there are never more than pools."""
        if self._settings.pools or not self._left:
            return self._settings.number_of(name, len(self._numbers))
        return self._left.get(name, next(iter(self._left.values())))

    def _close(self) -> None:
        for sockets in self._opened.values():
            sockets.publish.close(linger=0)
            if sockets.replay:
                sockets.replay.close(linger=0)
        self._context.term()

    def _open(self, number: int) -> PublisherSockets:
        settings = self._settings
        replay: zmq.asyncio.Socket | None = None
        with contextlib.ExitStack() as undo:
            try:
                publish = self._context.socket(zmq.PUB)
                undo.callback(publish.close, linger=0)
                publish.sndhwm = settings.buffer_batches
                if is_bound(settings.endpoint):
                    _bind(publish, numbered(settings.endpoint, number))
                else:
                    publish.connect(settings.endpoint)
                if settings.replay_endpoint:
                    replay = self._async_context.socket(zmq.ROUTER)
                    undo.callback(replay.close, linger=0)
                    replay.router_mandatory = True  # so that a peer that went away, or is slow, is told
                    replay.maxmsgsize = _MAX_REQUEST_BYTES
                    _bind(replay, numbered(settings.replay_endpoint, number))
            except zmq.ZMQError as error:
                raise OSError(f"cannot publish on {settings.endpoint}: {zmq.strerror(error.errno or 0)}") from error
            undo.pop_all()
        sockets = self._opened[number] = PublisherSockets(publish, replay)
        return sockets


def _bind(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", endpoint: str) -> None:
    socket.ipv6 = "[" in endpoint
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(f"cannot publish on {endpoint}: {zmq.strerror(error.errno or 0)}") from error


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.critical("bug: its events are published no more", extra={"pool": task.get_name()}, exc_info=error)
