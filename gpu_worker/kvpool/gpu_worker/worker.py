"""A rank of a pool: joins the pool, holds the planned tensors, and admits the steps of a runner.

A worker has two threads. The protocol thread handles the stream and never waits for a device, so that heartbeats
continue. The cache thread allocates, frees and calls the hooks, one job at a time.
"""

import os
import queue
import random
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final, Self, TypeVar, assert_never

from kvpool.core.errors import AbortedError, InvalidArgumentError, KvpoolError, UnavailableError
from kvpool.core.ids import TableLease
from kvpool.core.ranks.messages import Planned, Rank, Ready, Registration
from kvpool.core.specs.base import KVCacheSpec
from kvpool.gpu_worker.cache import HeldCache
from kvpool.gpu_worker.device import available_bytes, describe_device, device_memory, open_device
from kvpool.gpu_worker.fence import Fence, StaleTablesError, StepTicket
from kvpool.gpu_worker.hooks import ReadyPool, WorkerHooks
from kvpool.gpu_worker.join import Phase, RankProtocol
from kvpool.gpu_worker.layouts import LayerCache, check_layouts
from kvpool.gpu_worker.messages import (
    Allocate,
    Allocation,
    Effect,
    EpochBegan,
    EpochPassed,
    Failed,
    Initialized,
    JoinLater,
    OpenStream,
    Send,
    WorkerMessage,
)
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import DeviceMemory, WorkerStatus, WorkerUsage
from kvpool.gpu_worker.stream import Incoming, JoinStream, message_request, registration_request
from kvpool.gpu_worker.tensors import BufferAllocator, empty_buffer
from kvpool.gpu_worker.worker_log import WorkerLog
from kvpool.wire.errors import DeadlineError
from kvpool.wire.ranks import server_message_from_proto

__all__ = ["ReadyPool", "Worker", "WorkerHooks", "WorkerSettings", "WorkerStatus"]

LEAVE_TIMEOUT_SECONDS: Final = 2.0
"""Time that the server may take to end the stream of a rank that leaves."""
_MAX_WAIT_SECONDS: Final = 3600.0

_ResultT = TypeVar("_ResultT")
_Event = Callable[[], list[Effect]]


@contextmanager
def _on_signals(numbers: tuple[signal.Signals, ...], call: Callable[[], None]) -> Iterator[None]:
    """Calls `call` on each of the signals. The call must be reentrant, as `SimpleQueue.put` is."""
    before = {number: signal.signal(number, lambda *_: call()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Worker:
    """One rank. Thread-safe."""

    def __init__(
        self,
        settings: WorkerSettings,
        layers: Mapping[str, KVCacheSpec],
        *,
        layouts: Mapping[str, str] | None = None,
        hooks: WorkerHooks | None = None,
        allocate: BufferAllocator = empty_buffer,
    ) -> None:
        """Opens the device and measures its memory. Does not join the pool.

        Args:
            settings: The rank, its pool and its device.
            layers: Spec of each layer of the rank, in the model's order.
            layouts: Layout name of each layer whose backend specifies one; other layers get the default of their kind.
            hooks: Callbacks of the runner.
            allocate: Allocates one buffer; for runners with their own allocator.

        Raises:
            InvalidArgumentError: The device does not exist or lacks memory, a layer or layout is unknown, or a layout
                cannot represent its layer's pages.
        """
        self._settings = settings
        self._hooks = hooks or WorkerHooks()
        check_layouts(layouts or {}, layers)
        self.device = open_device(settings.device)
        registration = Registration(
            rank=Rank(settings.rank),
            world_size=settings.world_size,
            boot_id=uuid.uuid4().hex,
            options=settings.options,
            layers=dict(layers),
            available_bytes=available_bytes(self.device, settings),
            device=describe_device(self.device),
            host=socket.gethostname(),
            pid=os.getpid(),
            fences=True,
        )
        registration.check()
        self._available_bytes = registration.available_bytes
        reserve_bytes = settings.reserve_bytes if self.device.type == "cuda" else 0
        self._cache = HeldCache(self.device, layouts or {}, reserve_bytes, allocate)
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._fence = Fence(lambda: self._events.put(self._protocol.steps_ended))
        self._protocol = RankProtocol(registration, random.random, self._fence)
        self._stream: JoinStream | None = None
        self._jobs: ThreadPoolExecutor | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._ready: ReadyPool | None = None
        self._failure: Exception | None = None
        self._is_over = False
        self._reported_status: WorkerStatus | None = None
        self._log = WorkerLog(settings)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Worker {self._name}: {self.status.phase.value}, epoch {self.status.epoch}>"

    @property
    def status(self) -> WorkerStatus:
        """The current status of the rank."""
        ready, status = self._ready, self._protocol.status
        return WorkerStatus(
            self._protocol.phase,
            ready.epoch if ready else 0,
            ready.num_blocks if ready else 0,
            status.state if status else None,
            status.absent_ranks if status else (),
        )

    @property
    def usage(self) -> WorkerUsage:
        """Memory, stream and step counts of the rank."""
        protocol, answered = self._protocol, self._protocol.answered_seconds
        return WorkerUsage(
            self._available_bytes,
            self._cache.allocated_bytes,
            protocol.num_joins,
            protocol.num_answers,
            None if answered is None else time.time() - (time.monotonic() - answered),
            self._fence.num_in_flight,
        )

    def device_memory(self) -> DeviceMemory:
        """Reads the memory of the device; costs a driver call."""
        return device_memory(self.device)

    @property
    def kv_caches(self) -> Mapping[str, LayerCache]:
        """View of each layer's pages in the current epoch; empty if there is none."""
        ready = self._ready
        return ready.kv_caches if ready else {}

    def start(self) -> None:
        """Joins the pool in threads of the worker, and joins again after errors, until `close`."""
        if self._thread:
            raise RuntimeError("the worker was started before")
        self._thread = threading.Thread(target=self._run_in_thread, name=f"kvpool-{self._name}", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Joins the pool, and joins again after errors, until SIGTERM or SIGINT; then leaves. For the main thread.

        Raises:
            KvpoolError: The server refused the rank permanently, or fewer than two blocks fit the device.
        """
        with _on_signals((signal.SIGTERM, signal.SIGINT), lambda: self._events.put(self._protocol.leave)):
            try:
                self._run_protocol()
            finally:
                self._end()
        if self._failure:
            raise self._failure

    def wait_ready(self, timeout_seconds: float | None = None) -> ReadyPool:
        """Waits until the pool is open.

        Args:
            timeout_seconds: Maximum time to wait; None to wait indefinitely.

        Raises:
            DeadlineError: The pool is not open by then; names the absent ranks.
            AbortedError: The worker was closed.
            KvpoolError: The server refused the rank permanently, or fewer than two blocks fit the device.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_over, timeout_seconds)
            if self._failure:
                raise self._failure
            if self._is_over:
                raise AbortedError("CLOSED", f"{self._name} has left the pool")
            if self._ready is None:
                raise DeadlineError("NOT_READY", f"{self._name} is not ready: {self.status.describe()}")
            return self._ready

    def step(self, lease: TableLease) -> StepTicket:
        """Admits a step whose block tables were handed out under a lease: `Session.table_lease`.

        No other session is given the step's blocks until its ticket is done. Use `with worker.step(lease):` around the
        step and the wait for the device, or call `ticket.done()` later, from any thread. Where one rank sends steps to
        the others, only that rank calls this, and holds the ticket until all ranks have run the step, so that a step
        runs on all ranks or on none. Costs a lock.

        Leases outlive a broken stream: the rank keeps its tensors until the server ends the epoch.

        Raises:
            StaleTablesError: The epoch has passed or the session has ended: the step must not run.
        """
        try:
            return self._fence.step(lease)
        except StaleTablesError as error:
            if error.reason == "NOT_READY":
                message = f"a step of epoch {lease.epoch}: {self.status.describe()}"
                raise StaleTablesError(error.reason, message, field=error.field) from None
            raise

    def close(self) -> None:
        """Leaves the pool, frees the tensors, and waits for both. Hooks must not call this."""
        if self._thread:
            self._events.put(self._protocol.leave)
            self._thread.join()

    @property
    def _name(self) -> str:
        return f"rank {self._settings.rank} of {self._settings.world_size}"

    # The methods below run in the protocol thread, except those that are marked as jobs.

    def _run_in_thread(self) -> None:
        try:
            self._run_protocol()
            if isinstance(self._failure, KvpoolError):
                self._log.failed(self._failure)
        except Exception as error:  # noqa: BLE001 - thread boundary: logged, and raised in `wait_ready`
            self._log.failed(error)
            self._failure = error
        finally:
            self._end()

    def _run_protocol(self) -> None:
        protocol = self._protocol
        with ThreadPoolExecutor(1, thread_name_prefix=f"kvpool-cache-{self._settings.rank}") as self._jobs:
            try:
                while not protocol.is_over:
                    self._carry_out(protocol.tick(time.monotonic()))
                    self._report_status()
                    wait_seconds = min(max(protocol.next_due_seconds - time.monotonic(), 0.0), _MAX_WAIT_SECONDS)
                    try:
                        event = self._events.get(timeout=wait_seconds)
                    except queue.Empty:
                        continue
                    self._carry_out(event())
            finally:
                self._unpublish()
                if self._stream:
                    self._stream.finish(LEAVE_TIMEOUT_SECONDS)
                self._jobs.submit(self._release).result()
        if protocol.phase is Phase.LEFT:
            self._log.left()

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._report_status()

    def _report_status(self) -> None:
        status = self.status
        if status != self._reported_status:
            self._reported_status = status
            self._hooks.on_status(status)

    def _unpublish(self) -> None:
        with self._changed:
            self._ready = None

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case OpenStream(registration):
                    self._open_stream(registration)
                case Send(message):
                    self._send(message)
                case JoinLater(error, pause_seconds):
                    self._drop_stream()
                    self._log.joins_later(error, pause_seconds)
                case Allocate(planned):
                    self._log.allocating(planned)
                    self._submit(partial(self._allocate, planned), partial(self._protocol.allocated, planned))
                case EpochBegan(ready):
                    self._submit(partial(self._begin_epoch, ready), lambda _: [])
                case EpochPassed(epoch):
                    self._unpublish()
                    if not self._protocol.is_over:
                        self._log.passed(epoch)
                case Failed(error):
                    self._failure = error
                case _:
                    assert_never(effect)

    def _open_stream(self, registration: Registration) -> None:
        first = registration_request(self._settings.pool, registration)
        try:
            self._stream = JoinStream(self._settings.server, self._settings.access, first, self._deliver)
        except ValueError as error:  # a certificate or token is missing or being replaced
            reason = UnavailableError("NO_ACCESS", str(error))
            self._events.put(lambda: self._protocol.stream_ended(reason, time.monotonic()))

    def _send(self, message: WorkerMessage) -> None:
        if isinstance(message, Initialized):
            self._log.allocated(message.epoch, message.allocation)
        if self._stream:
            self._stream.send(message_request(message))

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream:
            stream.cancel()

    def _deliver(self, stream: JoinStream, incoming: Incoming) -> None:
        """Hands an incoming message to the protocol thread; called by the stream's reader."""
        self._events.put(partial(self._received, stream, incoming))

    def _received(self, stream: JoinStream, incoming: Incoming) -> list[Effect]:
        if stream is not self._stream:
            return []
        now_seconds = time.monotonic()
        if isinstance(incoming, KvpoolError):
            self._drop_stream()
            return self._protocol.stream_ended(incoming, now_seconds)
        try:
            message = server_message_from_proto(incoming)
        except InvalidArgumentError as error:
            return self._protocol.fail(error)
        if message is None:
            return []
        self._log.received(message)
        return self._protocol.received(message, now_seconds)

    def _submit(self, job: Callable[[], _ResultT], then: Callable[[_ResultT], list[Effect]]) -> None:
        """Runs a job in the cache thread, then `then` with its result in the protocol thread."""
        if self._jobs is None:
            return

        def done(future: Future[_ResultT]) -> None:
            self._events.put(partial(self._job_done, future, then))

        self._jobs.submit(job).add_done_callback(done)

    def _job_done(self, future: Future[_ResultT], then: Callable[[_ResultT], list[Effect]]) -> list[Effect]:
        error = future.exception()
        if isinstance(error, Exception):
            if not isinstance(error, KvpoolError):
                self._log.failed(error)
            return self._protocol.fail(error)
        return then(future.result())

    def _allocate(self, planned: Planned) -> Allocation:
        """Job: frees the current tensors and allocates those of a plan."""
        self._release()
        return self._cache.allocate(planned.config)

    def _release(self) -> None:
        """Job: has the runner drop its views, then frees the tensors, even if the hook fails."""
        if not self._cache.is_empty:
            try:
                self._hooks.on_release()
            finally:
                self._cache.release()

    def _begin_epoch(self, ready: Ready) -> None:
        """Job: makes the views, has the runner bind them, then admits steps."""
        config, kv_caches = self._cache.view(ready.num_blocks)
        pool = ReadyPool(ready.epoch, ready.num_blocks, config, ready.max_model_len, kv_caches, self._cache.buffers)
        self._hooks.on_epoch(pool)
        with self._changed:
            if self._protocol.ready is not ready:
                return  # the epoch has passed meanwhile
            self._ready = pool
            self._fence.open(pool.epoch)
            self._changed.notify_all()
        self._log.ready(ready, pool.allocated_bytes, str(self.device))
