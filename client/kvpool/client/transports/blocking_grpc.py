"""The service over a synchronous gRPC channel, and blocking links. Its coroutines block: `kvpool.client.blocking`."""

import os
import select
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any, Final

import grpc

from kvpool.client.blocking import run
from kvpool.client.lease import LeaseTimer
from kvpool.client.server_link import ServerLink
from kvpool.client.transports.grpc import GrpcTransport, on_open_channel
from kvpool.client.transports.link_calls import SocketCall, open_socket
from kvpool.client.transports.step_stream import LinkCall, ScheduleCall, StepCall, StepStream
from kvpool.client.transports.watches import WatchCall, observe_servers
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.wire.channels import ClientCredentials

_OPEN: Final = ClientCredentials()
_RETRY_SECONDS: Final = 1.0
"""Pause after a renewal that has failed."""


class BlockingGrpcTransport(GrpcTransport):
    """The service at an address. Threads may share it; each session belongs to one thread at a time."""

    def __init__(self, address: str, deadline_seconds: float, access: ClientCredentials = _OPEN) -> None:
        super().__init__(address, deadline_seconds, access)
        self._closed = threading.Event()

    def _open_link(self, address: str) -> ServerLink:
        return ServerLink(address, self.access.channel(address, self.channel_options), self.access.token_reader())

    async def _call_once(
        self, method: Callable[[ServerLink], Any], request: object, link: ServerLink, timeout_seconds: float
    ) -> Any:  # noqa: ANN401 - any RPC
        self.check_usable()
        try:
            with on_open_channel(self.connection, link):
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
        with on_open_channel(self.connection, link):
            call = getattr(link, stub).Watch(request)
        return _WatchCall(call, silence_seconds, link, self.connection)

    def _open_stream(self, session_id: str, lease_timer: LeaseTimer) -> "_StepStream":
        return _StepStream(session_id, lease_timer, self)

    def _start_observation(self) -> None:
        threading.Thread(target=lambda: run(observe_servers(self)), name="kvpool-directory", daemon=True).start()

    def _end_observation(self) -> None:
        self._closed.set()


class _ScheduleCall(ScheduleCall):
    """See `ScheduleCall`."""

    def send(self, step: bytes, due_seconds: float) -> None:
        """See `StepCall`."""
        with on_open_channel(self._connection, self._link):
            self._call = self._link.schedule(iter((step,)), timeout=max(due_seconds - time.monotonic(), 0.001))

    async def receive(self, due_seconds: float) -> bytes:
        """See `StepCall`."""
        try:
            answer: bytes = next(self._call)
        except StopIteration:
            raise ConnectionResetError from None
        except grpc.RpcError as error:
            if time.monotonic() >= due_seconds:
                raise TimeoutError from None
            raise self._connection.error_of(error, self._link) from None
        return answer


class _StepStream(StepStream):
    """See `StepStream`. A thread keeps the session alive."""

    def __init__(self, session_id: str, lease_timer: LeaseTimer, transport: "BlockingGrpcTransport") -> None:
        super().__init__(session_id, lease_timer, transport)
        self._closed = threading.Event()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when the call is another one, and with `_closed`; -1 after the end of the thread."""
        self._lock = threading.Lock()
        threading.Thread(target=self._keep_alive, name="kvpool-keepalive", daemon=True).start()

    def end(self) -> None:
        """See `StepStream`."""
        self._closed.set()
        super().end()
        self._wake()

    async def _dial(self, address: str, due_seconds: float) -> LinkCall:
        return SocketCall(open_socket(address, self._transport.access, due_seconds), self._refusal)

    async def _open(self, link: ServerLink, due_seconds: float) -> StepCall:
        call = await super()._open(link, due_seconds)
        if call.is_link:
            self._wake()
        return call

    def _open_schedule(self, link: ServerLink) -> StepCall:
        return _ScheduleCall(link, self._connection)

    async def _sleep(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _wake(self) -> None:
        with self._lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _keep_alive(self) -> None:
        """Extends the lease, now and then; at once when a link has ended, as the session may have, too."""
        renewal_seconds = time.monotonic() + self._period_seconds
        lost: StepCall | None = None
        while not (self._closed.is_set() or self._ended_by):
            call = self._call
            is_lost = self._wait_for_end(None if call is lost else call, renewal_seconds - time.monotonic())
            is_lost = is_lost and self._call is call  # else this process has ended it
            if self._closed.is_set() or not (is_lost or time.monotonic() >= renewal_seconds):
                continue
            lost = call if is_lost else lost
            period_seconds = self._period_seconds
            try:
                run(self._renew())
            except KvpoolError as error:
                self._renewal_failed(error)
                period_seconds = min(period_seconds, _RETRY_SECONDS)
            renewal_seconds = time.monotonic() + period_seconds
        with self._lock:
            os.close(self._wakeup)
            self._wakeup = -1

    def _wait_for_end(self, call: StepCall | None, seconds: float) -> bool:
        """Waits until a link has ended, the call is another one, or a time has passed. Returns whether it has ended."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if isinstance(call, SocketCall) and (file := call.fileno()) >= 0:
            poll.register(file, select.POLLRDHUP)
        found = dict(poll.poll(max(seconds, 0.0) * 1000))
        if found.pop(self._wakeup, 0):
            os.eventfd_read(self._wakeup)
        return bool(found)


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
