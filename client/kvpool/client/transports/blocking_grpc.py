"""The service over a synchronous gRPC channel. Its coroutines block: see `kvpool.client.blocking`.

Round trip of an empty step: synchronous stream 320 us, asyncio driven by the caller 346, asyncio on a background thread
385, unary call 522.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Final

import grpc

from kvpool.client.blocking import run
from kvpool.client.lease import LeaseTimer
from kvpool.client.primary_connection import REPLACED, PrimaryConnection
from kvpool.client.server_link import ServerLink
from kvpool.client.transports.grpc import GrpcTransport
from kvpool.client.transports.step_stream import StepStream, StreamTransport
from kvpool.client.transports.watches import WatchCall, observe_servers
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.v1 import step_pb2
from kvpool.wire.channels import ClientCredentials
from kvpool.wire.errors import DeadlineError, not_sent_error

_OPEN: Final = ClientCredentials()
_TAKING_SECONDS: Final = 0.002
"""Time limit for the sending thread to take a message that is sent ahead."""
_LOST_SECONDS: Final = 1.0
"""Interval of renewals while no stream is open, which would show that the session has ended."""


class BlockingGrpcTransport(GrpcTransport):
    """The service at an address. Threads may share it; each session belongs to one thread at a time."""

    def __init__(self, address: str, deadline_seconds: float, access: ClientCredentials = _OPEN) -> None:
        super().__init__(address, deadline_seconds, access)
        self._closed = threading.Event()

    def _open_link(self, address: str) -> ServerLink:
        return ServerLink(address, self._access.channel(address, self.channel_options))

    async def _call_once(
        self, method: Callable[[ServerLink], Any], request: object, link: ServerLink, timeout_seconds: float
    ) -> Any:  # noqa: ANN401 - any RPC
        self.check_usable()
        try:
            with _on_open_channel(self.connection, link):
                return method(link)(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            self.check_usable()  # it may have been closed meanwhile
            raise self.connection.error_of(error, link) from None

    async def sleep(self, seconds: float) -> None:
        """See `GrpcTransport`."""
        self._closed.wait(seconds)

    def open_watch(
        self, link: ServerLink, stub: str, request: object, silence_seconds: float | None = None
    ) -> "_WatchCall":
        """See `GrpcTransport`."""
        with _on_open_channel(self.connection, link):
            call = getattr(link, stub).Watch(request)
        return _WatchCall(call, silence_seconds, link, self.connection)

    def _open_stream(self, session_id: str, lease_timer: LeaseTimer) -> "_StepStream":
        return _StepStream(session_id, lease_timer, self)

    def _start_observation(self) -> None:
        threading.Thread(target=lambda: run(observe_servers(self)), name="kvpool-directory", daemon=True).start()

    def _end_observation(self) -> None:
        self._closed.set()


@contextmanager
def _on_open_channel(connection: PrimaryConnection, link: ServerLink) -> Iterator[None]:
    """Converts the error of a call on a channel that another thread has just closed."""
    try:
        yield
    except ValueError:
        connection.check()
        if connection.is_replaced(link):
            raise not_sent_error(*REPLACED) from None
        raise


class _StepStream(StepStream):
    """See `StepStream`. A thread keeps the session alive, and cancels a call whose step is past its deadline."""

    def __init__(self, session_id: str, lease_timer: LeaseTimer, transport: StreamTransport) -> None:
        super().__init__(session_id, lease_timer, transport)
        self._outgoing: queue.SimpleQueue[step_pb2.Step | None] = queue.SimpleQueue()
        self._taken = threading.Event()
        """Set when the sending thread has taken the message that was put last."""
        self._due_seconds = inf
        self._closed = threading.Event()
        self._woken = threading.Event()
        """Set when a call has ended, and with `_closed`: the session may have ended, too."""
        threading.Thread(target=self._keep_alive, name="kvpool-keepalive", daemon=True).start()

    def end(self) -> None:
        """See `StepStream`."""
        self._closed.set()
        self._woken.set()
        super().end()

    def end_call(self) -> None:
        """See `StepStream`."""
        self._outgoing.put(None)
        super().end_call()

    def _open_call(self, link: ServerLink) -> object:
        self._outgoing = queue.SimpleQueue()
        with _on_open_channel(self._connection, link):
            call = link.allocator.Schedule(self._messages(self._outgoing))
        if not call.add_callback(self._woken.set):  # it has ended
            self._woken.set()
        return call

    async def _write(self, message: step_pb2.Step, due_seconds: float) -> None:
        del due_seconds
        self._outgoing.put(message)

    async def _write_ahead(self, message: step_pb2.Step, due_seconds: float) -> None:
        self._taken.clear()
        await super()._write_ahead(message, due_seconds)
        self._taken.wait(_TAKING_SECONDS)  # the sending thread does not run while this one is busy

    async def _read(self, message: step_pb2.Step, due_seconds: float) -> step_pb2.StepResult:
        call = self._call
        if call is None:  # closed by another thread
            raise UnavailableError("CANCELLED", "the stream was cancelled")
        self._due_seconds = due_seconds
        try:
            answer: step_pb2.StepResult = next(call)
        except (grpc.RpcError, StopIteration) as error:
            raise self._failure(error, message.sequence) from None
        finally:
            self._due_seconds = inf
        return answer

    async def _sleep(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _messages(self, outgoing: "queue.SimpleQueue[step_pb2.Step | None]") -> Iterator[step_pb2.Step]:
        """Yields the messages of a call, in the thread that sends them."""
        while (message := outgoing.get()) is not None:
            self._taken.set()
            yield message

    def _failure(self, error: grpc.RpcError | StopIteration, sequence: int) -> KvpoolError:
        if time.monotonic() >= self._due_seconds:
            return DeadlineError("DEADLINE", f"no answer to step {sequence} in {self._deadline_seconds} s")
        if isinstance(error, StopIteration) or self._link is None:
            return UnavailableError("ENDED", "the server ended the stream")
        return self._connection.error_of(error, self._link)

    def _pause_seconds(self, renewal_seconds: float) -> float:
        """Time until the next renewal or the deadline of a step; at most a period, as a step may begin meanwhile."""
        left_seconds = min(renewal_seconds, self._due_seconds) - time.monotonic()
        return min(max(left_seconds, 0.01), self._period_seconds)

    def _keep_alive(self) -> None:
        renewal_seconds = time.monotonic() + self._period_seconds
        while True:
            is_due = self._woken.wait(self._pause_seconds(renewal_seconds)) or time.monotonic() >= renewal_seconds
            self._woken.clear()
            call = self._call
            if call is not None and time.monotonic() >= self._due_seconds:
                call.cancel()  # ends the wait in _read()
            if self._closed.is_set() or (self._ended_by and self._due_seconds == inf):  # no step waits, and none will
                return
            if not is_due:
                continue
            try:
                run(self._renew())
            except KvpoolError as error:
                if self._renewal_failed(error):
                    renewal_seconds = inf
                    continue
            is_lost = call is None or not call.is_active()
            renewal_seconds = time.monotonic() + min(self._period_seconds, _LOST_SECONDS if is_lost else inf)


class _WatchCall(WatchCall):
    """See `WatchCall`. A thread cancels the call after too long a silence."""

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - see `WatchCall`
        super().__init__(*args)
        self._waits_since_seconds = inf
        self._ended = threading.Event()
        self._was_silent = False
        self._num_read = 0

    async def read(self) -> Any:  # noqa: ANN401 - see `WatchCall`
        """See `WatchCall`. The time that the caller takes between two messages does not count as silence.

        The thread starts with the second message, so that a watch that is never iterated leaves no thread.
        """
        self._waits_since_seconds = time.monotonic()
        if self._num_read == 1 and self._silence_seconds:
            threading.Thread(
                target=self._limit_silence, args=(self._silence_seconds,), name="kvpool-watch", daemon=True
            ).start()
        self._num_read += 1
        try:
            return next(self._call)
        except StopIteration:
            error: KvpoolError = UnavailableError("ENDED", "the server ended the watch")
        except grpc.RpcError as failure:
            error = self._connection.error_of(failure, self._link)
        finally:
            self._waits_since_seconds = inf
        if self._was_silent:
            error = self._silence_error()
        raise error

    def cancel(self) -> None:
        """See `WatchCall`."""
        self._ended.set()
        super().cancel()

    def _limit_silence(self, limit_seconds: float) -> None:
        while not self._ended.wait(limit_seconds / 4):
            if time.monotonic() - self._waits_since_seconds > limit_seconds:
                self._was_silent = True
                self._call.cancel()
                return
