"""Watches of a pool's block events, over all servers that come to have it; and observation of a shard's servers."""

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


class WatchedShard(Protocol):
    """What a watch needs of the transport to a shard."""

    @property
    def connection(self) -> PrimaryConnection:
        """The connection to the primary."""

    def observe(self) -> None:
        """Observes the shard from now on."""

    def open_watch(
        self, link: ServerLink, stub: str, request: object, silence_seconds: float | None = None
    ) -> WatchCall:
        """Starts a call of Watch, cancelled after a silence of `silence_seconds`; None for never."""

    async def sleep(self, seconds: float) -> None:
        """Waits."""


_Begun = tuple[ServerLink, WatchCall, event_pb2.WatchResponse]
"""The link of a call, the call, and its first message."""
_Find = Callable[[], Awaitable[WatchedShard]]


async def begin_watch(
    shard: WatchedShard, options: WatchOptions, deadline_seconds: float, find: _Find | None
) -> AsyncGenerator[EventBatch]:
    """Begins a watch, which is established when this returns. See `GrpcTransport.watch` for the arguments."""
    state = ResumableWatch(options)
    attempt = partial(_first_call, shard, state)
    shard.observe()
    has_others = shard.connection.has_others
    begun = await shard.connection.call(
        attempt, deadline_seconds if has_others else inf, shard.sleep if has_others else None
    )
    return _batches(shard, state, begun, find)


async def _first_call(shard: WatchedShard, state: ResumableWatch, link: ServerLink, timeout_seconds: float) -> _Begun:
    """Starts a watch. The connection limits its time: a watch has no deadline."""
    del timeout_seconds
    call = _open(shard, state, link)
    try:
        return link, call, await call.read()
    except BaseException as error:
        call.cancel()
        if isinstance(error, KvpoolError):
            shard.connection.check()  # closed meanwhile
        raise


def _open(shard: WatchedShard, state: ResumableWatch, link: ServerLink) -> WatchCall:
    return shard.open_watch(link, "events", state.request(), state.silence_seconds)


async def _batches(
    shard: WatchedShard, state: ResumableWatch, begun: _Begun, find: _Find | None
) -> AsyncGenerator[EventBatch]:
    message: event_pb2.WatchResponse | None
    link, call, message = begun
    search = shard.connection.new_search()
    while True:
        try:
            try:
                while True:
                    batch = state.read(message or await call.read())
                    message = None
                    if batch:
                        yield batch
                        shard.connection.check()
                        search = shard.connection.new_search()
            finally:
                call.cancel()
        except KvpoolError as error:
            shard.connection.check()
            pause_seconds = state.pause_seconds(error)  # a watch never ends, and has its own pauses
            is_lost = shard.connection.next_target(search, link.address, error) is not None
        await shard.sleep(pause_seconds)
        shard.connection.check()
        if is_lost and find:
            with contextlib.suppress(KvpoolError):
                found = await find()
                if found is not shard:
                    shard, search = found, found.connection.new_search()
                    shard.observe()
        link = await shard.connection.link()
        call = _open(shard, state, link)


async def observe_shard(shard: WatchedShard, name: str) -> None:
    """Observes the servers of a shard until the client is closed. See `PrimaryConnection.observe`.

    Args:
        shard: The transport to the shard.
        name: Name of the shard; empty for that of any server.
    """

    def watch(link: ServerLink) -> Callable[[], Awaitable[directory_pb2.Shard]]:
        call = shard.open_watch(link, "directory", directory_pb2.DirectoryServiceWatchRequest(shard=name))

        async def read() -> directory_pb2.Shard:
            found: directory_pb2.Shard = (await call.read()).shard
            return found

        return read

    backoff = Backoff(0.5, 0.5)
    with contextlib.suppress(WrongStateError):  # closed
        while True:
            if not await shard.connection.observe(watch):
                await shard.sleep(backoff.next())
