"""A watch of a pool's block events: begins it, and continues it at the servers and shards that have the pool."""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar

from kvpool.client.primary_connection import Link, PrimaryConnection
from kvpool.client.transports.resumable_watch import ResumableWatch
from kvpool.client.transports.transport import EventBatch, WatchOptions
from kvpool.core.errors import KvpoolError
from kvpool.v1 import event_pb2


class WatchCall(Protocol):
    """A call of Watch."""

    async def read(self) -> Any:  # noqa: ANN401 - the response of the service that is watched
        """Waits for the next message. Raises UnavailableError at the end (ENDED), or after a silence (SILENT)."""

    def cancel(self) -> object:
        """Ends the call."""


_LinkT = TypeVar("_LinkT", bound=Link)


class WatchedShard(Protocol[_LinkT]):
    """What a watch needs of the transport to a shard."""

    @property
    def connection(self) -> PrimaryConnection[_LinkT]:
        """The connection to the primary."""

    def observe(self) -> None:
        """Observes the shard from now on."""

    def open_watch(self, link: _LinkT, stub: str, request: object, silence_seconds: float | None = None) -> WatchCall:
        """Starts a call of Watch, cancelled after a silence of `silence_seconds`; None for never."""

    async def sleep(self, seconds: float) -> None:
        """Waits."""


_Begun = tuple[_LinkT, WatchCall, event_pb2.WatchResponse | None]
"""The link of a call, the call, and its first message if that was read already."""
_Find = Callable[[], Awaitable[WatchedShard[_LinkT]]]


async def begin_watch(
    shard: WatchedShard[_LinkT], options: WatchOptions, deadline_seconds: float, find: _Find[_LinkT] | None
) -> AsyncGenerator[EventBatch]:
    """Begins a watch, which is established when this returns. See `GrpcTransport.watch` for the arguments."""
    state = ResumableWatch(options)
    attempt = partial(_first_call, shard, state)
    shard.observe()
    if shard.connection.has_others:
        begun = await shard.connection.call(attempt, deadline_seconds, shard.sleep)
    else:
        begun = await shard.connection.call_round(attempt, shard.connection.new_search(), inf)
    return _batches(shard, state, begun, find)


async def _first_call(
    shard: WatchedShard[_LinkT], state: ResumableWatch, link: _LinkT, timeout_seconds: float
) -> _Begun[_LinkT]:
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


def _open(shard: WatchedShard[_LinkT], state: ResumableWatch, link: _LinkT) -> WatchCall:
    return shard.open_watch(link, "events", state.request(), state.silence_seconds)


async def _batches(
    shard: WatchedShard[_LinkT], state: ResumableWatch, begun: _Begun[_LinkT], find: _Find[_LinkT] | None
) -> AsyncGenerator[EventBatch]:
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
            pause_seconds, is_lost = state.pause_seconds(error), False
            try:
                shard.connection.next_target(search, link.address, error)
            except KvpoolError:  # the watch never ends, and has its own pauses
                is_lost = True
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
