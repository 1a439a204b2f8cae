"""The threads of a rank: its stream to the server, its memory and the hooks of its runner.

A rank has two threads. The protocol thread handles the stream and never waits for a device, so that heartbeats
continue. The cache thread allocates, frees and calls the hooks, one job at a time.
"""

import os
import queue
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Final, Generic, Protocol, Self, TypeVar, assert_never

import torch

from kvpool.core.errors import AbortedError, InvalidArgumentError, KvpoolError, UnavailableError
from kvpool.core.ids import TableLease
from kvpool.core.planning.plan import KVCacheConfig
from kvpool.core.ranks.messages import DeclaredMemory, Planned, Rank, Ready, Registration
from kvpool.core.specs.base import KVCacheSpec
from kvpool.gpu_worker.device import describe_device, device_memory
from kvpool.gpu_worker.layouts import LayerCache
from kvpool.gpu_worker.rank_effects import (
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
from kvpool.gpu_worker.rank_pool import RankPool, WorkerHooks
from kvpool.gpu_worker.rank_protocol import Phase, RankFence, RankProtocol
from kvpool.gpu_worker.route import Route
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import DeviceMemory, WorkerStatus, WorkerUsage
from kvpool.gpu_worker.stream import (
    FirstMessage,
    Incoming,
    RankCall,
    message_request,
    place_request,
    registration_request,
)
from kvpool.gpu_worker.worker_log import WorkerLog
from kvpool.wire.address import parse_seeds
from kvpool.wire.errors import DeadlineError
from kvpool.wire.ranks import server_message_from_proto
from kvpool.wire.seeds import ShardAddress

LEAVE_TIMEOUT_SECONDS: Final = 2.0
"""Time that the server may take to end the stream of a rank that leaves."""
_MAX_WAIT_SECONDS: Final = 3600.0

_ResultT = TypeVar("_ResultT")
_FenceT = TypeVar("_FenceT", bound=RankFence)
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


class RankCache(Protocol):
    """The memory of a rank. Only the cache thread calls its methods; any thread may read `allocated_bytes`."""

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The buffers that this process maps: int8 (bytes,), one per tensor of the plan, or none."""

    @property
    def is_empty(self) -> bool:
        """Whether no memory is held."""

    @property
    def allocated_bytes(self) -> int:
        """Size of the memory that is held."""

    def allocate(self, config: KVCacheConfig) -> Allocation:
        """Frees the memory that is held, then allocates that of a plan. Raises KvpoolError if it does not fit."""

    def view(self, num_blocks: int) -> tuple[KVCacheConfig, dict[str, LayerCache]]:
        """The configuration for the first blocks, and the view of each layer, if this process has views."""

    def release(self) -> None:
        """Frees the memory."""


def rank_registration(
    settings: WorkerSettings,
    device: torch.device,
    *,
    available_bytes: int,
    layers: Mapping[str, KVCacheSpec] = MappingProxyType({}),
    declared: DeclaredMemory | None = None,
) -> Registration:
    """Makes the registration of a rank.

    Args:
        settings: The rank, its pool and its device.
        device: The device.
        available_bytes: Memory of the device for the rank; see `device.available_bytes`.
        layers: Spec of each layer, if the server plans the memory.
        declared: What an engine declares instead.

    Raises:
        InvalidArgumentError: A value is out of range.
    """
    registration = Registration(
        rank=Rank(settings.rank),
        world_size=settings.world_size,
        boot_id=uuid.uuid4().hex,
        options=settings.options,
        layers=layers,
        available_bytes=available_bytes,
        device=describe_device(device),
        host=socket.gethostname(),
        pid=os.getpid(),
        fences=True,
        declared=declared,
    )
    registration.check()
    return registration


class RankRunner(Generic[_FenceT]):
    """Runs one rank. Thread-safe."""

    def __init__(  # noqa: PLR0913 - the parts of a rank
        self,
        settings: WorkerSettings,
        registration: Registration,
        *,
        device: torch.device,
        cache: RankCache,
        fence: Callable[[Callable[[], None]], _FenceT],
        hooks: WorkerHooks,
        held: Allocation | None = None,
    ) -> None:
        """Does not join the pool.

        Args:
            settings: The rank, its pool and its device.
            registration: What the rank registers with.
            device: Device of the memory.
            cache: The memory.
            fence: Makes the fence, given a function for it to call when stale steps have ended.
            hooks: Callbacks of the runner.
            held: What the cache holds from an earlier process, which `registration.held` describes; None for nothing.
        """
        self._settings = settings
        self._hooks = hooks
        self.device = device
        self._available_bytes = registration.available_bytes
        self._cache = cache
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._fence = fence(lambda: self._events.put(self._protocol.steps_ended))
        self._protocol = RankProtocol(registration, Route(parse_seeds(settings.server)), self._fence, held)
        self._stream: RankCall | None = None
        self._jobs: ThreadPoolExecutor | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ready: RankPool | None = None
        self._waiting: set[Future[RankPool]] = set()
        """Futures of callers that wait for the pool."""
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
    def is_over(self) -> bool:
        """Whether the rank has ended, by itself or by request. It holds no memory, unless it was abandoned."""
        return self._is_over

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

    def wait_ready(self, timeout_seconds: float | None = None) -> RankPool:
        """Waits until the pool is open.

        Args:
            timeout_seconds: Maximum time to wait; None to wait indefinitely.

        Raises:
            DeadlineError: The pool is not open by then; names the absent ranks.
            AbortedError: The worker was closed.
            KvpoolError: The server refused the rank permanently, or fewer than two blocks fit the device.
        """
        ready = self.ready()
        if not wait((ready,), timeout_seconds).done and ready.cancel():
            raise DeadlineError("NOT_READY", f"{self._name} is not ready: {self.status.describe()}")
        return ready.result()

    def ready(self) -> Future[RankPool]:
        """The pool once it is open, or the error that `wait_ready` raises, without a deadline. May be cancelled."""
        ready: Future[RankPool] = Future()
        ready.add_done_callback(self._waiting.discard)
        with self._lock:
            self._waiting.add(ready)
        self._answer_waiting()
        return ready

    def close(self) -> None:
        """Leaves the pool, frees the tensors, and waits for both. Hooks must not call this."""
        if self._thread:
            self._events.put(self._protocol.leave)
            self._thread.join()

    def abandon(self) -> None:
        """Ends the rank without leaving the pool, and keeps the memory for a later process. Waits for both."""
        if self._thread:
            self._events.put(self._protocol.abandon)
            self._thread.join()

    def report_gone(self, leases: Collection[TableLease]) -> None:
        """Reports sessions whose processes have exited, so that they end at once and not with their lease."""
        self._events.put(lambda: self._protocol.sessions_gone(leases))

    def _answer_waiting(self) -> None:
        """Answers the callers that wait, if the pool is open or the rank has ended. Any thread may call it."""
        with self._lock:
            pool, failure = self._ready, self._failure
            if pool is None and not self._is_over:
                return
            waiting = tuple(self._waiting)
            self._waiting.clear()
        for future in filter(Future.set_running_or_notify_cancel, waiting):
            if failure:
                future.set_exception(failure)
            elif pool is None:
                future.set_exception(AbortedError("CLOSED", f"{self._name} has left the pool"))
            else:
                future.set_result(pool)

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
                    self._stream.finish(0.0 if protocol.route.asks else LEAVE_TIMEOUT_SECONDS)
                if protocol.phase is not Phase.ABANDONED:
                    self._jobs.submit(self._release).result()
        if protocol.phase is Phase.LEFT:
            self._log.left()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
        self._answer_waiting()
        self._report_status()

    def _report_status(self) -> None:
        status = self.status
        if status != self._reported_status:
            self._reported_status = status
            self._hooks.on_status(status)

    def _unpublish(self) -> None:
        with self._lock:
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
                    self._pass_epoch(epoch)
                case Failed(error):
                    self._failure = error
                case _:
                    assert_never(effect)

    def _pass_epoch(self, epoch: int) -> None:
        self._unpublish()
        if not self._protocol.is_over:
            self._log.passed(epoch)

    def _open_stream(self, registration: Registration) -> None:
        """Joins, or asks for the shard of the pool first."""
        settings, route = self._settings, self._protocol.route
        self._log.server = route.target
        access = settings.access if route.asks else settings.access.at_shard(route.shard or "")
        first: FirstMessage = registration_request(settings.pool, registration)
        if route.asks:
            first = place_request(settings.pool, settings.zone)
        try:
            self._stream = RankCall(route.target, access, first, self._deliver)
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

    def _deliver(self, stream: RankCall, incoming: Incoming) -> None:
        """Hands an incoming message to the protocol thread; called by the stream's reader."""
        self._events.put(partial(self._received, stream, incoming))

    def _received(self, stream: RankCall, incoming: Incoming) -> list[Effect]:
        if stream is not self._stream:
            return []
        now_seconds = time.monotonic()
        if isinstance(incoming, KvpoolError):
            self._drop_stream()
            return self._protocol.stream_ended(incoming, now_seconds)
        if isinstance(incoming, ShardAddress):
            self._drop_stream()
            return self._protocol.placed(incoming)
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
        pool = RankPool(ready.epoch, ready.num_blocks, config, ready.max_model_len, kv_caches, self._cache.buffers)
        self._hooks.on_epoch(pool)
        with self._lock:
            if self._protocol.ready is not ready:
                return  # the epoch has passed meanwhile
            self._ready = pool
            self._fence.open(pool.epoch)
        self._answer_waiting()
        self._log.ready(ready, pool.allocated_bytes, str(self.device))
