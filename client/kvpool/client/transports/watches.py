"""Watches of a pool's block events, over all servers that come to have it; and observation of the servers."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from math import inf
from typing import Any, Protocol

from kvpool.client.primary_connection import PrimaryConnection
from kvpool.client.server_link import ServerLink
from kvpool.client.transports.resumable_watch import ResumableWatch
from kvpool.client.transports.transport import EventBatch, WatchOptions
from kvpool.core.errors import KvpoolError, UnavailableError, WrongStateError
from kvpool.v1 import directory_pb2, event_pb2
from kvpool.wire.backoff import Backoff


class WatchCall(ABC):
    """A call of Watch, which ends after too long a silence."""

    def __init__(
        self,
        call: Any,  # noqa: ANN401 - of either kind of channel
        silence_seconds: float | None,
        link: ServerLink,
        connection: PrimaryConnection,
    ) -> None:
        self._call = call
        self._silence_seconds = silence_seconds
        self._link = link
        self._connection = connection

    @abstractmethod
    async def read(self) -> Any:  # noqa: ANN401 - the response of the service that is watched
        """Waits for the next message. Raises UnavailableError at the end (ENDED), or after a silence (SILENT)."""

    def cancel(self) -> None:
        """Ends the call."""
        self._call.cancel()

    def _silence_error(self) -> UnavailableError:
        return UnavailableError("SILENT", f"no message came for {self._silence_seconds} s")


class WatchedServers(Protocol):
    """What a watch needs of the transport."""

    @property
    def connection(self) -> PrimaryConnection:
        """The connection to the primary."""

    def observe(self) -> None:
        """Observes the servers from now on."""

    def open_watch(
        self, link: ServerLink, stub: str, request: object, silence_seconds: float | None = None
    ) -> WatchCall:
        """Starts a call of Watch, cancelled after a silence of `silence_seconds`; None for never."""

    async def sleep(self, seconds: float) -> None:
        """Waits."""


_Begun = tuple[ServerLink, WatchCall, event_pb2.WatchResponse]
"""The link of a call, the call, and its first message."""


async def begin_watch(
    servers: WatchedServers, options: WatchOptions, deadline_seconds: float
) -> AsyncGenerator[EventBatch]:
    """Begins a watch, which is established when this returns: within the deadline if several addresses are known."""
    state = ResumableWatch(options)
    attempt = partial(_first_call, servers, state)
    servers.observe()
    has_others = servers.connection.has_others
    begun = await servers.connection.call(
        attempt, deadline_seconds if has_others else inf, servers.sleep if has_others else None
    )
    return _batches(servers, state, begun)


async def _first_call(
    servers: WatchedServers, state: ResumableWatch, link: ServerLink, timeout_seconds: float
) -> _Begun:
    """Starts a watch. The connection limits its time: a watch has no deadline."""
    del timeout_seconds
    call = _open(servers, state, link)
    try:
        return link, call, await call.read()
    except BaseException as error:
        call.cancel()
        if isinstance(error, KvpoolError):
            servers.connection.check()  # closed meanwhile
        raise


def _open(servers: WatchedServers, state: ResumableWatch, link: ServerLink) -> WatchCall:
    return servers.open_watch(link, "events", state.request(), state.silence_seconds)


async def _batches(servers: WatchedServers, state: ResumableWatch, begun: _Begun) -> AsyncGenerator[EventBatch]:
    message: event_pb2.WatchResponse | None
    link, call, message = begun
    search = servers.connection.new_search()
    while True:
        try:
            try:
                while True:
                    batch = state.read(message or await call.read())
                    message = None
                    if batch:
                        yield batch
                        servers.connection.check()
                        search = servers.connection.new_search()
            finally:
                call.cancel()
        except KvpoolError as error:
            servers.connection.check()
            pause_seconds = state.pause_seconds(error)  # a watch never ends, and has its own pauses
            lost_pool = state.lost_pool(error)
            servers.connection.next_target(search, link.address, error)
        if lost_pool:
            yield lost_pool
        await servers.sleep(pause_seconds)
        servers.connection.check()
        link = await servers.connection.link()
        call = _open(servers, state, link)


async def observe_servers(servers: WatchedServers) -> None:
    """Observes the servers until the client is closed. See `PrimaryConnection.observe`."""

    def watch(link: ServerLink) -> Callable[[], Awaitable[directory_pb2.Shard]]:
        call = servers.open_watch(link, "directory", directory_pb2.DirectoryServiceWatchRequest())

        async def read() -> directory_pb2.Shard:
            found: directory_pb2.Shard = (await call.read()).shard
            return found

        return read

    backoff = Backoff(0.5, 0.5)
    with contextlib.suppress(WrongStateError):  # closed
        while True:
            if not await servers.connection.observe(watch):
                await servers.sleep(backoff.next())
