"""The service over a synchronous gRPC channel."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from math import inf
from typing import Final, Protocol, TypeVar

import grpc

from kvpool.client import retries, steps
from kvpool.client.errors import DeadlineError, InvalidArgumentError, KvpoolError, UnavailableError, WrongStateError
from kvpool.client.lease import now_seconds
from kvpool.client.transports import messages, watching
from kvpool.client.transports.embedded import EventBatch, OpenedSession, WatchOptions
from kvpool.core.blocks.quota import Quota
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Step, StepResult
from kvpool.core.views.pool_info import PoolInfo
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, event_pb2_grpc, step_pb2
from kvpool.wire import channels
from kvpool.wire import steps as wire_steps
from kvpool.wire.channels import Access
from kvpool.wire.errors import from_rpc_error

_OPEN: Final = Access()
_TAKING_SECONDS: Final = 0.002
"""What the thread that sends may take for a message that is sent ahead."""
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_RequestT = TypeVar("_RequestT")
_RequestT_contra = TypeVar("_RequestT_contra", contravariant=True)


class _Call(Protocol[_T_co]):
    """A stream of responses that can be cancelled."""

    def __iter__(self) -> Iterator[_T_co]: ...

    def __next__(self) -> _T_co: ...

    def cancel(self) -> object: ...


class _Method(Protocol[_RequestT_contra, _T_co]):
    """A unary call."""

    def __call__(self, request: _RequestT_contra, timeout: float | None = None) -> _T_co: ...


class GrpcTransport:
    """The service at an address. Threads may share it; each session belongs to one thread at a time."""

    def __init__(self, address: str, deadline_seconds: float, access: Access = _OPEN) -> None:
        self._deadline_seconds = deadline_seconds
        self._channel = access.channel(address, channels.SESSION_CHANNEL_OPTIONS)
        self._stub = allocator_pb2_grpc.AllocatorServiceStub(self._channel)
        self._events = event_pb2_grpc.EventServiceStub(self._channel)
        self._streams: dict[str, _StepStream] = {}

    def create_pool(self, config: PoolConfig) -> PoolInfo:
        """See `Transport`."""
        return messages.read_pool(self._call(self._stub.CreatePool, messages.create_pool_request(config)))

    def get_pool(self, name: str) -> PoolInfo:
        """See `Transport`."""
        return messages.read_pool(self._call(self._stub.GetPool, allocator_pb2.GetPoolRequest(pool_name=name)))

    def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """See `Transport`."""
        due_seconds = time.monotonic() + timeout_seconds
        left_seconds = timeout_seconds
        while True:
            try:
                with _converted():
                    request = messages.wait_request(name, left_seconds)
                    answer = self._stub.WaitUntilReady(request, timeout=left_seconds + self._deadline_seconds)
                return messages.check_ready(messages.read_pool(answer), timeout_seconds)
            except UnavailableError as error:
                time.sleep(messages.wait_pause_seconds(error, due_seconds))
            left_seconds = max(due_seconds - time.monotonic(), 0.0)

    def open_session(
        self, pool: str, client_name: str, lease_seconds: float, quota: Quota, memory_id: str = ""
    ) -> OpenedSession:
        """See `Transport`. From here on a thread keeps the session alive."""
        request = messages.open_session_request(pool, client_name, lease_seconds, quota, memory_id)
        sent_seconds, response = self._call_timed(self._stub.OpenSession, request)
        return self._drive(messages.read_session(response, sent_seconds))

    def resume_session(self, session_id: str, sequence: int) -> OpenedSession:
        """See `Transport`. From here on a thread keeps the session alive."""
        request = messages.resume_session_request(session_id, sequence)
        sent_seconds, response = self._call_timed(self._stub.ResumeSession, request)
        return self._drive(messages.read_session(response, sent_seconds))

    def apply(self, session_id: str, step: Step) -> StepResult:
        """See `Transport`."""
        try:
            stream = self._stream(session_id)
            message = stream.sent_ahead(step.sequence) or wire_steps.step_to_proto(step, session_id)
            return wire_steps.result_from_proto(stream.exchange(message))
        except KvpoolError as error:
            self._note(session_id, error)
            raise

    def send(self, session_id: str, step: Step) -> None:
        """See `Transport`."""
        stream = self._streams.get(session_id)
        with contextlib.suppress(InvalidArgumentError):
            if stream:
                stream.send_ahead(wire_steps.step_to_proto(step, session_id))

    def mark_executed(self, session_id: str, executed_sequence: int) -> None:
        """See `Transport`."""
        request = allocator_pb2.MarkExecutedRequest(session_id=session_id, executed_sequence=executed_sequence)
        with self._noted(session_id):
            sent_seconds, _ = self._call_timed(self._stub.MarkExecuted, request)
        self._stream(session_id).lease_timer.renew(sent_seconds)

    def close_session(self, session_id: str) -> int:
        """See `Transport`."""
        if session_id in self._streams:  # else it has ended: the server says how
            self._streams[session_id].close()
        request = allocator_pb2.CloseSessionRequest(session_id=session_id)
        with self._noted(session_id):
            count = self._call(self._stub.CloseSession, request).num_freed_requests
        self._forget(session_id)
        return count

    def watch(self, options: WatchOptions) -> Iterator[EventBatch]:
        """See `Transport`. The watch stands when this returns."""
        return watching.watch(self._events, options)

    def close(self) -> None:
        """See `Transport`."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._channel.close()

    def _drive(self, opened: OpenedSession) -> OpenedSession:
        self._streams[opened.session_id] = _StepStream(self._stub, opened, self._deadline_seconds)
        return opened

    @contextlib.contextmanager
    def _noted(self, session_id: str) -> Iterator[None]:
        """Takes note of what a call ends with that is no step."""
        try:
            yield
        except KvpoolError as error:
            self._note(session_id, error)
            raise

    def _note(self, session_id: str, error: KvpoolError) -> None:
        """Keeps nothing of a session that the server says to have ended."""
        if steps.ends_session(error):
            self._forget(session_id)

    def _forget(self, session_id: str) -> None:
        stream = self._streams.pop(session_id, None)
        if stream:
            stream.close()

    def _stream(self, session_id: str) -> "_StepStream":
        stream = self._streams.get(session_id)
        if stream is None:
            raise _closed_error()
        return stream

    def _call(self, method: _Method[_RequestT, _T], request: _RequestT) -> _T:
        return self._call_timed(method, request)[1]

    def _call_timed(self, method: _Method[_RequestT, _T], request: _RequestT) -> tuple[float, _T]:
        """Makes a call that may be sent again; tells when what was answered was sent."""

        def attempt(left_seconds: float) -> tuple[float, _T]:
            sent_seconds = now_seconds()
            with _converted():
                return sent_seconds, method(request, timeout=left_seconds)

        return retries.call(attempt, self._deadline_seconds)


class _StepStream:
    """One session's stream of steps, reopened when it breaks, and the thread that keeps the session alive.

    Attributes:
        lease_timer: How long the session's lease is sure to last.
    """

    def __init__(
        self, stub: allocator_pb2_grpc.AllocatorServiceStub, opened: OpenedSession, deadline_seconds: float
    ) -> None:
        self.lease_timer = opened.lease_timer
        self._stub = stub
        self._session_id = opened.session_id
        self._deadline_seconds = deadline_seconds
        self._outgoing: queue.SimpleQueue[step_pb2.Step | None] = queue.SimpleQueue()
        self._taken = threading.Event()  # by the thread that sends: the message that was put last
        self._call: _Call[step_pb2.StepResult] | None = None
        self._batched: tuple[step_pb2.Step, float] | None = None  # sent then, and not waited for yet
        self._due_seconds = inf
        self._closed = threading.Event()
        self._ended_by: KvpoolError | None = None
        self._period_seconds = min(opened.lease_seconds / 3, deadline_seconds / 4)
        threading.Thread(target=self._keep_alive, name="kvpool-keepalive", daemon=True).start()

    def send_ahead(self, message: step_pb2.Step) -> None:
        """Sends a step, without an answer; `exchange` must follow with the same message, and tells what went wrong."""
        if self._closed.is_set() or self._ended_by:
            return
        try:
            sent_seconds = now_seconds()
            self._taken.clear()
            self._put(message)
            self._batched = message, sent_seconds
            self._taken.wait(_TAKING_SECONDS)  # the thread that sends gets no turn while this one is busy
        except BaseException:
            self._end_call()  # nobody knows whether an answer comes
            raise

    def sent_ahead(self, sequence: int) -> step_pb2.Step | None:
        """The message of a step that was sent ahead; None if it was not."""
        return self._batched[0] if self._batched and self._batched[0].sequence == sequence else None

    def exchange(self, message: step_pb2.Step) -> step_pb2.StepResult:
        """Sends a step and waits for its result, over as many streams as that takes within the deadline."""
        self._due_seconds = time.monotonic() + self._deadline_seconds
        try:
            return retries.call(lambda _: self._exchange_once(message), self._deadline_seconds, self._closed.wait)
        finally:
            self._due_seconds = inf

    def close(self) -> None:
        """Ends the stream and the thread."""
        self._closed.set()
        self._end_call()

    def _exchange_once(self, message: step_pb2.Step) -> step_pb2.StepResult:
        if self._closed.is_set():
            raise _closed_error()
        if self._ended_by:  # nobody keeps a deadline any more
            raise self._ended_by
        try:
            ahead, self._batched = self._batched, None
            call, sent_seconds = self._call, now_seconds()
            if call and ahead and ahead[0] is message:
                sent_seconds = ahead[1]
            else:
                call = self._put(message)
            answer = next(call)
        except BaseException as error:
            self._end_call()  # its answer, should it come yet, would be taken for the next step's
            if isinstance(error, grpc.RpcError | StopIteration):
                raise self._failure(error, message.sequence) from None
            raise
        self.lease_timer.renew(sent_seconds)
        if answer.sequence != message.sequence:
            self._end_call()  # so that the next step's answer is not one that comes late, too
        return answer

    def _put(self, message: step_pb2.Step) -> _Call[step_pb2.StepResult]:
        if self._call is None:
            self._outgoing = queue.SimpleQueue()
            self._call = self._stub.Schedule(self._messages(self._outgoing))
        self._outgoing.put(message)
        return self._call

    def _messages(self, outgoing: "queue.SimpleQueue[step_pb2.Step | None]") -> Iterator[step_pb2.Step]:
        """What a stream sends, in the thread that sends it."""
        while (message := outgoing.get()) is not None:
            self._taken.set()
            yield message

    def _failure(self, error: grpc.RpcError | StopIteration, sequence: int) -> KvpoolError:
        if time.monotonic() >= self._due_seconds:
            return DeadlineError("DEADLINE", f"no answer to step {sequence} in {self._deadline_seconds} s")
        if isinstance(error, StopIteration):
            return UnavailableError("ENDED", "the server ended the stream")
        if error.code() is grpc.StatusCode.CANCELLED:  # by the thread, as the step before this one came too late
            return UnavailableError("CANCELLED", "the stream was given up")
        return from_rpc_error(error)

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._outgoing.put(None)
            call.cancel()

    def _pause_seconds(self, renewal_seconds: float) -> float:
        """Until the next renewal or a step's deadline; a period at most, as a step may begin meanwhile."""
        left_seconds = min(renewal_seconds, self._due_seconds) - time.monotonic()
        return min(max(left_seconds, 0.01), self._period_seconds)

    def _keep_alive(self) -> None:
        request = allocator_pb2.KeepAliveRequest(session_id=self._session_id)
        renewal_seconds = time.monotonic() + self._period_seconds
        while not self._closed.wait(self._pause_seconds(renewal_seconds)):
            call = self._call
            if call is not None and time.monotonic() >= self._due_seconds:
                call.cancel()  # exchange() waits in it: this is what gives a step on a stream its deadline
            if self._ended_by and self._due_seconds == inf:  # no step waits, and none will
                return
            if time.monotonic() < renewal_seconds:
                continue
            sent_seconds = now_seconds()
            try:
                self._stub.KeepAlive(request, timeout=self._period_seconds)
            except grpc.RpcError as error:
                answer = from_rpc_error(error)
                if steps.ends_session(answer):
                    self.lease_timer.end()
                    self._ended_by = answer  # the next step will tell
                    renewal_seconds = inf
                    continue
            except ValueError:  # the channel was closed
                return
            else:
                self.lease_timer.renew(sent_seconds)
            renewal_seconds = time.monotonic() + self._period_seconds


def _closed_error() -> WrongStateError:
    return WrongStateError("CLOSED", "the session was closed in this process, or its client")


@contextlib.contextmanager
def _converted() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        converted: KvpoolError = from_rpc_error(error)
        raise converted from None
