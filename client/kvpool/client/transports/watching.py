"""Watches over a synchronous gRPC channel."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol, Self

import grpc

from kvpool.client.errors import KvpoolError, UnavailableError
from kvpool.client.transports import messages
from kvpool.client.transports.embedded import EventBatch, WatchOptions
from kvpool.client.transports.resumable_watch import ResumableWatch
from kvpool.v1 import event_pb2, event_pb2_grpc
from kvpool.wire.errors import from_rpc_error


class _Call(Protocol):
    """A stream of responses that can be cancelled."""

    def __next__(self) -> event_pb2.WatchResponse: ...

    def cancel(self) -> object: ...


def watch(stub: event_pb2_grpc.EventServiceStub, options: WatchOptions) -> Iterator[EventBatch]:
    """Begins a watch, which stands when this returns.

    Raises:
        KvpoolError: It was refused; or, from the iterator, ended.
    """
    if options.snapshot:
        follower = ResumableWatch(options)
        call: _Call = stub.Watch(follower.request())
        return _follow(stub, follower, call, _next(call))
    call = stub.Watch(messages.watch_request(options))
    _next(call)
    return _batches(call)


def _batches(call: _Call) -> Iterator[EventBatch]:
    try:
        while True:
            yield messages.read_batch(_next(call))
    finally:
        call.cancel()


def _follow(
    stub: event_pb2_grpc.EventServiceStub, follower: ResumableWatch, call: _Call, first: event_pb2.WatchResponse
) -> Iterator[EventBatch]:
    message: event_pb2.WatchResponse | None = first
    while True:
        try:
            with _Silence(call, follower) as silence:
                while True:
                    batch = follower.read(message or silence.next())
                    message = None
                    if batch:
                        yield batch
        except KvpoolError as error:
            time.sleep(follower.pause_seconds(error))
        call = stub.Watch(follower.request())


class _Silence:
    """Gives a call up, from a thread, when nothing is heard on it for too long."""

    def __init__(self, call: _Call, follower: ResumableWatch) -> None:
        self._call = call
        self._resumable_watch = follower
        self._waits_since_seconds = float("inf")
        self._ended = threading.Event()
        self._was_silent = False

    def __enter__(self) -> Self:
        if self._resumable_watch.silence_seconds:
            limit_seconds = self._resumable_watch.silence_seconds
            threading.Thread(target=self._listen, args=(limit_seconds,), name="kvpool-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._call.cancel()

    def next(self) -> event_pb2.WatchResponse:
        """Waits for the next message; what the caller does between two of them is not silence."""
        self._waits_since_seconds = time.monotonic()
        try:
            return _next(self._call)
        except KvpoolError:
            if self._was_silent:
                raise self._resumable_watch.silent() from None
            raise
        finally:
            self._waits_since_seconds = float("inf")

    def _listen(self, limit_seconds: float) -> None:
        while not self._ended.wait(limit_seconds / 4):
            if time.monotonic() - self._waits_since_seconds > limit_seconds:
                self._was_silent = True
                self._call.cancel()
                return


def _next(call: _Call) -> event_pb2.WatchResponse:
    with contextlib.suppress(StopIteration):
        try:
            return next(call)
        except grpc.RpcError as error:
            converted: KvpoolError = from_rpc_error(error)
            raise converted from None
    raise UnavailableError("ENDED", "the server ended the watch")
