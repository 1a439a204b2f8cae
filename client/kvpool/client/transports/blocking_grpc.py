"""The service over a synchronous gRPC channel. Its coroutines block: see `kvpool.client.blocking`."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Final, Protocol, TypeVar

import grpc

from kvpool.client.connection_state import ConnectionState
from kvpool.client.lease import now_seconds
from kvpool.client.transports.grpc import GrpcTransport, StepStream
from kvpool.client.transports.resumable_watch import ResumableWatch
from kvpool.client.transports.transport import OpenedSession
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, event_pb2, event_pb2_grpc, step_pb2
from kvpool.wire import channels
from kvpool.wire.channels import Access
from kvpool.wire.errors import DeadlineError

_OPEN: Final = Access()
_TAKING_SECONDS: Final = 0.002
"""Time limit for the sending thread to take a message that is sent ahead."""
_T_co = TypeVar("_T_co", covariant=True)


class _Call(Protocol[_T_co]):
    """A stream of responses that can be cancelled."""

    def __iter__(self) -> Iterator[_T_co]: ...

    def __next__(self) -> _T_co: ...

    def cancel(self) -> object: ...


class BlockingGrpcTransport(GrpcTransport):
    """The service at an address. Threads may share it; each session belongs to one thread at a time."""

    def __init__(self, address: str, deadline_seconds: float, access: Access = _OPEN) -> None:
        super().__init__(address, deadline_seconds, access)
        self._channel = access.channel(address, channels.SESSION_CHANNEL_OPTIONS)
        self._stub: allocator_pb2_grpc.AllocatorServiceStub = allocator_pb2_grpc.AllocatorServiceStub(self._channel)
        self._events = event_pb2_grpc.EventServiceStub(self._channel)

    async def _call_once(self, method: Callable[..., Any], request: object, timeout_seconds: float) -> Any:  # noqa: ANN401 - any RPC
        self.check_usable()
        try:
            return method(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            self.check_usable()  # it may have been closed meanwhile
            raise self._connection.error_of(error) from None
        except ValueError:  # another thread has just closed the channel
            self.check_usable()
            raise

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - blocks, as all of this transport

    def _open_stream(self, opened: OpenedSession) -> "_StepStream":
        return _StepStream(self._stub, opened, self._deadline_seconds, self._connection)

    def _start_watch(self, state: ResumableWatch) -> "_WatchCall":
        return _WatchCall(self._events.Watch(state.request()), state, self._connection)

    async def _close_channel(self) -> None:
        self._channel.close()


class _StepStream(StepStream):
    """See `StepStream`. A thread keeps the session alive, and cancels a call whose step is past its deadline."""

    def __init__(
        self,
        stub: allocator_pb2_grpc.AllocatorServiceStub,
        opened: OpenedSession,
        deadline_seconds: float,
        connection: ConnectionState,
    ) -> None:
        super().__init__(opened, deadline_seconds, connection)
        self._stub = stub
        self._outgoing: queue.SimpleQueue[step_pb2.Step | None] = queue.SimpleQueue()
        self._taken = threading.Event()
        """Set when the sending thread has taken the message that was put last."""
        self._call: _Call[step_pb2.StepResult] | None = None
        self._due_seconds = inf
        self._closed = threading.Event()
        threading.Thread(target=self._keep_alive, name="kvpool-keepalive", daemon=True).start()

    def close(self) -> None:
        """See `StepStream`."""
        self._closed.set()
        super().close()

    def end_call(self) -> None:
        """See `StepStream`."""
        call, self._call = self._call, None
        if call is not None:
            self._outgoing.put(None)
            call.cancel()

    async def _exchange_once(self, message: step_pb2.Step, timeout_seconds: float) -> step_pb2.StepResult:
        self._due_seconds = time.monotonic() + timeout_seconds
        try:
            return await super()._exchange_once(message, timeout_seconds)
        finally:
            self._due_seconds = inf

    async def _write(self, message: step_pb2.Step) -> None:
        if self._call is None:
            self._outgoing = queue.SimpleQueue()
            self._call = self._stub.Schedule(self._messages(self._outgoing))
        self._outgoing.put(message)

    async def _write_ahead(self, message: step_pb2.Step) -> None:
        self._taken.clear()
        await self._write(message)
        self._taken.wait(_TAKING_SECONDS)  # the sending thread does not run while this one is busy

    async def _read(self, message: step_pb2.Step) -> step_pb2.StepResult:
        call = self._call
        if call is None:  # closed by another thread
            raise UnavailableError("CANCELLED", "the stream was cancelled")
        try:
            return next(call)
        except (grpc.RpcError, StopIteration) as error:
            raise self._failure(error, message.sequence) from None

    async def _sleep(self, seconds: float) -> None:
        self._closed.wait(seconds)

    @property
    def _has_call(self) -> bool:
        return self._call is not None

    def _messages(self, outgoing: "queue.SimpleQueue[step_pb2.Step | None]") -> Iterator[step_pb2.Step]:
        """Yields the messages of a call, in the thread that sends them."""
        while (message := outgoing.get()) is not None:
            self._taken.set()
            yield message

    def _failure(self, error: grpc.RpcError | StopIteration, sequence: int) -> KvpoolError:
        if time.monotonic() >= self._due_seconds:
            return DeadlineError("DEADLINE", f"no answer to step {sequence} in {self._deadline_seconds} s")
        if isinstance(error, StopIteration):
            return UnavailableError("ENDED", "the server ended the stream")
        if error.code() is grpc.StatusCode.CANCELLED:  # by the thread, as the step before was past its deadline
            return UnavailableError("CANCELLED", "the stream was cancelled")
        return self._connection.error_of(error)

    def _pause_seconds(self, renewal_seconds: float) -> float:
        """Time until the next renewal or the deadline of a step; at most a period, as a step may begin meanwhile."""
        left_seconds = min(renewal_seconds, self._due_seconds) - time.monotonic()
        return min(max(left_seconds, 0.01), self._period_seconds)

    def _keep_alive(self) -> None:
        request = allocator_pb2.KeepAliveRequest(session_id=self._session_id)
        renewal_seconds = time.monotonic() + self._period_seconds
        while not self._closed.wait(self._pause_seconds(renewal_seconds)):
            call = self._call
            if call is not None and time.monotonic() >= self._due_seconds:
                call.cancel()  # ends the wait in _read()
            if self._ended_by and self._due_seconds == inf:  # no step waits, and none will
                return
            if time.monotonic() < renewal_seconds:
                continue
            sent_seconds = now_seconds()
            try:
                self._stub.KeepAlive(request, timeout=self._period_seconds)
            except grpc.RpcError as error:
                if self._note_failed_renewal(self._connection.error_of(error)):
                    renewal_seconds = inf
                    continue
            except ValueError:  # the channel was closed
                return
            else:
                self.lease_timer.renew(sent_seconds)
            renewal_seconds = time.monotonic() + self._period_seconds


class _WatchCall:
    """See `WatchCall`. A thread cancels the call after too long a silence."""

    def __init__(
        self, call: _Call[event_pb2.WatchResponse], state: ResumableWatch, connection: ConnectionState
    ) -> None:
        self._call = call
        self._state = state
        self._connection = connection
        self._waits_since_seconds = inf
        self._ended = threading.Event()
        self._was_silent = False
        self._num_read = 0

    async def read(self) -> event_pb2.WatchResponse:
        """See `WatchCall`. The time that the caller takes between two messages does not count as silence.

        The thread starts with the second message, so that a watch that is never iterated leaves no thread.
        """
        self._waits_since_seconds = time.monotonic()
        if self._num_read == 1 and self._state.silence_seconds:
            threading.Thread(
                target=self._limit_silence, args=(self._state.silence_seconds,), name="kvpool-watch", daemon=True
            ).start()
        self._num_read += 1
        try:
            return next(self._call)
        except StopIteration:
            error: KvpoolError = UnavailableError("ENDED", "the server ended the watch")
        except grpc.RpcError as failure:
            error = self._connection.error_of(failure)
        finally:
            self._waits_since_seconds = inf
        raise self._state.silence_error() if self._was_silent else error

    def cancel(self) -> None:
        """See `WatchCall`."""
        self._ended.set()
        self._call.cancel()

    def _limit_silence(self, limit_seconds: float) -> None:
        while not self._ended.wait(limit_seconds / 4):
            if time.monotonic() - self._waits_since_seconds > limit_seconds:
                self._was_silent = True
                self._call.cancel()
                return
