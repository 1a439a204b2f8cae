"""The service over a synchronous gRPC channel."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Protocol, TypeVar

import grpc

from kvpool.client import watching, wire
from kvpool.client.errors import DeadlineError, KvpoolError, UnavailableError, from_rpc_error
from kvpool.client.transport import EventBatch, OpenedSession, WatchOptions
from kvpool.server.core.allocator import PoolInfo
from kvpool.server.core.config import PoolConfig
from kvpool.server.core.step import Step, StepResult
from kvpool.server.rpc import convert
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, event_pb2_grpc, step_pb2

_T_co = TypeVar("_T_co", covariant=True)


class _Call(Protocol[_T_co]):
    """A stream of responses that can be cancelled."""

    def __iter__(self) -> Iterator[_T_co]: ...

    def __next__(self) -> _T_co: ...

    def cancel(self) -> object: ...


class GrpcTransport:
    """The service at an address. Threads may share it; each session belongs to one thread at a time."""

    def __init__(self, address: str, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._channel = grpc.insecure_channel(address, options=wire.CHANNEL_OPTIONS)
        self._stub = allocator_pb2_grpc.AllocatorServiceStub(self._channel)
        self._events = event_pb2_grpc.EventServiceStub(self._channel)
        self._streams: dict[str, _StepStream] = {}

    def create_pool(self, config: PoolConfig) -> PoolInfo:
        """See `Transport`."""
        with _converted():
            return wire.read_pool(
                self._stub.CreatePool(wire.create_pool_request(config), timeout=self._deadline_seconds)
            )

    def get_pool(self, name: str) -> PoolInfo:
        """See `Transport`."""
        with _converted():
            request = allocator_pb2.GetPoolRequest(pool_name=name)
            return wire.read_pool(self._stub.GetPool(request, timeout=self._deadline_seconds))

    def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """See `Transport`."""
        due_seconds = time.monotonic() + timeout_seconds
        left_seconds = timeout_seconds
        while True:
            try:
                with _converted():
                    request = wire.wait_request(name, left_seconds)
                    answer = self._stub.WaitUntilReady(request, timeout=left_seconds + self._deadline_seconds)
                return wire.check_ready(wire.read_pool(answer), timeout_seconds)
            except UnavailableError as error:
                time.sleep(wire.wait_pause_seconds(error, due_seconds))
            left_seconds = max(due_seconds - time.monotonic(), 0.0)

    def open_session(self, pool: str, client_name: str, lease_seconds: float) -> OpenedSession:
        """See `Transport`. From here on a thread keeps the session alive."""
        with _converted():
            request = wire.open_session_request(pool, client_name, lease_seconds)
            opened = wire.read_session(self._stub.OpenSession(request, timeout=self._deadline_seconds))
        self._streams[opened.session_id] = _StepStream(self._stub, opened, self._deadline_seconds)
        return opened

    def apply(self, session_id: str, step: Step) -> StepResult:
        """See `Transport`."""
        return convert.result_from_proto(self._streams[session_id].exchange(convert.step_to_proto(step, session_id)))

    def mark_executed(self, session_id: str, executed_sequence: int) -> None:
        """See `Transport`."""
        with _converted():
            request = allocator_pb2.MarkExecutedRequest(session_id=session_id, executed_sequence=executed_sequence)
            self._stub.MarkExecuted(request, timeout=self._deadline_seconds)

    def close_session(self, session_id: str) -> int:
        """See `Transport`."""
        self._streams.pop(session_id).close()
        with _converted():
            request = allocator_pb2.CloseSessionRequest(session_id=session_id)
            return self._stub.CloseSession(request, timeout=self._deadline_seconds).num_freed_requests

    def watch(self, options: WatchOptions) -> Iterator[EventBatch]:
        """See `Transport`. The watch stands when this returns."""
        return watching.watch(self._events, options)

    def close(self) -> None:
        """See `Transport`."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._channel.close()


class _StepStream:
    """One session's stream of steps, reopened when it breaks, and the thread that keeps the session alive."""

    def __init__(
        self, stub: allocator_pb2_grpc.AllocatorServiceStub, opened: OpenedSession, deadline_seconds: float
    ) -> None:
        self._stub = stub
        self._session_id = opened.session_id
        self._deadline_seconds = deadline_seconds
        self._outgoing: queue.SimpleQueue[step_pb2.Step | None] = queue.SimpleQueue()
        self._call: _Call[step_pb2.StepResult] | None = None
        self._due_seconds = float("inf")
        self._closed = threading.Event()
        self._period_seconds = min(opened.lease_seconds / 3, deadline_seconds / 4)
        threading.Thread(target=self._keep_alive, name="kvpool-keepalive", daemon=True).start()

    def exchange(self, message: step_pb2.Step) -> step_pb2.StepResult:
        """Sends a step and waits for its result, over as many streams as that takes within the deadline."""
        self._due_seconds = time.monotonic() + self._deadline_seconds
        failure: KvpoolError | None = None
        pauses = iter(wire.REOPEN_PAUSES_SECONDS)
        pause_seconds: float | None = 0.0
        try:
            while pause_seconds is not None and not self._closed.is_set():
                self._closed.wait(min(pause_seconds, max(0.0, self._due_seconds - time.monotonic())))
                try:
                    return self._exchange_once(message)
                except grpc.RpcError as error:
                    self._end_call()
                    if time.monotonic() >= self._due_seconds:
                        break
                    failure = from_rpc_error(error)
                    if not isinstance(failure, UnavailableError):
                        break
                    pause_seconds = failure.retry_seconds or next(pauses, None)
        finally:
            self._due_seconds = float("inf")
        raise failure or DeadlineError(
            "DEADLINE", f"no answer to step {message.sequence} in {self._deadline_seconds} s"
        )

    def close(self) -> None:
        """Ends the stream and the thread."""
        self._closed.set()
        self._end_call()

    def _exchange_once(self, message: step_pb2.Step) -> step_pb2.StepResult:
        if self._call is None:
            self._outgoing = queue.SimpleQueue()
            self._call = self._stub.Schedule(iter(self._outgoing.get, None))
        self._outgoing.put(message)
        return next(self._call)

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._outgoing.put(None)
            call.cancel()

    def _keep_alive(self) -> None:
        request = allocator_pb2.KeepAliveRequest(session_id=self._session_id)
        while not self._closed.wait(self._period_seconds):
            call = self._call
            if call is not None and time.monotonic() >= self._due_seconds:
                call.cancel()  # exchange() waits in it: this is what gives a step on a stream its deadline
                continue
            with contextlib.suppress(grpc.RpcError, ValueError):  # the next step will tell; ValueError: channel closed
                self._stub.KeepAlive(request, timeout=self._period_seconds)


@contextlib.contextmanager
def _converted() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        converted: KvpoolError = from_rpc_error(error)
        raise converted from None
