"""The two threads of a rank, which carry out the effects of its protocol.

The protocol thread handles the stream and never waits for a device, so that heartbeats continue. The cache thread
allocates, frees and calls the hooks, one job at a time.
"""

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, Generic, TypeVar, assert_never

from kvpool.core.errors import InvalidArgumentError, KvpoolError, UnavailableError
from kvpool.core.ranks.messages import Planned, Ready, Registration
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
from kvpool.gpu_worker.rank_pool import RankCache, RankPool, WorkerHooks
from kvpool.gpu_worker.rank_protocol import Phase, RankFence, RankProtocol
from kvpool.gpu_worker.readiness import Readiness
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import WorkerStatus
from kvpool.gpu_worker.stream import Incoming, RankCall, message_request, registration_request
from kvpool.gpu_worker.worker_log import WorkerLog
from kvpool.wire.address import parse_seeds
from kvpool.wire.ranks import server_message_from_proto

LEAVE_TIMEOUT_SECONDS: Final = 2.0
"""Time that the server may take to end the stream of a rank that leaves."""
_MAX_WAIT_SECONDS: Final = 3600.0

_ResultT = TypeVar("_ResultT")
_FenceT = TypeVar("_FenceT", bound=RankFence)
_Event = Callable[[], list[Effect]]


class RankLoop(Generic[_FenceT]):
    """Runs the protocol of a rank. Any thread may call `put` and read attributes; see `RankRunner` for the rest.

    Attributes:
        name: Name of the rank, for messages and threads.
        protocol: The protocol. Only the thread of `run` calls its methods.
        fence: Admits the rank's steps.
        log: Logs its events.
        readiness: The pool.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        registration: Registration,
        cache: RankCache,
        fence: Callable[[Callable[[], None]], _FenceT],
        hooks: WorkerHooks,
    ) -> None:
        self.log = WorkerLog(settings)
        self.name = f"rank {settings.rank} of {settings.world_size}"
        self.readiness = Readiness(self.name)
        self.fence = fence(lambda: self.put(self.protocol.steps_ended))
        self.protocol = RankProtocol(registration, parse_seeds(settings.server), self.fence, cache.allocation)
        self._settings = settings
        self._device = registration.device
        self._cache = cache
        self._hooks = hooks
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._stream: RankCall | None = None
        self._jobs: ThreadPoolExecutor | None = None
        self._reported_status: WorkerStatus | None = None

    @property
    def status(self) -> WorkerStatus:
        """The current status of the rank."""
        pool, status = self.readiness.pool, self.protocol.status
        return WorkerStatus(
            self.protocol.phase,
            pool.epoch if pool else 0,
            pool.num_blocks if pool else 0,
            status.state if status else None,
            status.absent_ranks if status else (),
        )

    def put(self, event: _Event) -> None:
        """Has the protocol thread handle an event. Reentrant, so signal handlers may call it."""
        self._events.put(event)

    def run(self) -> None:
        """Joins the pool, and joins again after errors, until the protocol is over."""
        try:
            self._run_protocol()
        except Exception as error:
            self.readiness.failure = error
            raise
        finally:
            self.readiness.end()
            self._report_status()

    def _run_protocol(self) -> None:
        protocol = self.protocol
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
                self.readiness.close()
                if self._stream:
                    self._stream.finish(LEAVE_TIMEOUT_SECONDS)
                if protocol.phase is not Phase.ABANDONED:
                    self._jobs.submit(self._release).result()
        if protocol.phase is Phase.LEFT:
            self.log.left()

    def _report_status(self) -> None:
        status = self.status
        if status != self._reported_status:
            self._reported_status = status
            self._hooks.on_status(status)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case OpenStream(registration):
                    self._open_stream(registration)
                case Send(message):
                    self._send(message)
                case JoinLater(error, pause_seconds):
                    self._drop_stream()
                    self.log.joins_later(error, pause_seconds)
                case Allocate(planned):
                    self.log.allocating(planned)
                    self._submit(partial(self._allocate, planned), partial(self.protocol.allocated, planned))
                case EpochBegan(ready):
                    self._submit(partial(self._begin_epoch, ready), lambda _: [])
                case EpochPassed(epoch):
                    self.readiness.close()
                    if not self.protocol.is_over:
                        self.log.passed(epoch)
                case Failed(error):
                    self.readiness.failure = error
                case _:
                    assert_never(effect)

    def _open_stream(self, registration: Registration) -> None:
        settings, target = self._settings, self.protocol.target
        self.log.server = target
        first = registration_request(settings.pool, registration)
        try:
            self._stream = RankCall(target, settings.access, first, self._deliver)
        except ValueError as error:  # a certificate or token is missing or being replaced
            reason = UnavailableError("NO_ACCESS", str(error))
            self.put(lambda: self.protocol.stream_ended(reason, time.monotonic()))

    def _send(self, message: WorkerMessage) -> None:
        if isinstance(message, Initialized):
            self.log.allocated(message.epoch, message.allocation)
        if self._stream:
            self._stream.send(message_request(message))

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream:
            stream.cancel()

    def _deliver(self, stream: RankCall, incoming: Incoming) -> None:
        """Hands an incoming message to the protocol thread; called by the stream's reader."""
        self.put(partial(self._received, stream, incoming))

    def _received(self, stream: RankCall, incoming: Incoming) -> list[Effect]:
        if stream is not self._stream:
            return []
        now_seconds = time.monotonic()
        if isinstance(incoming, KvpoolError):
            self._drop_stream()
            return self.protocol.stream_ended(incoming, now_seconds)
        try:
            message = server_message_from_proto(incoming)
        except InvalidArgumentError as error:
            return self.protocol.fail(error)
        if message is None:
            return []
        self.log.received(message)
        return self.protocol.received(message, now_seconds)

    def _submit(self, job: Callable[[], _ResultT], then: Callable[[_ResultT], list[Effect]]) -> None:
        """Runs a job in the cache thread, then `then` with its result in the protocol thread."""
        if self._jobs is None:
            return

        def done(future: Future[_ResultT]) -> None:
            self.put(partial(self._job_done, future, then))

        self._jobs.submit(job).add_done_callback(done)

    def _job_done(self, future: Future[_ResultT], then: Callable[[_ResultT], list[Effect]]) -> list[Effect]:
        error = future.exception()
        if isinstance(error, Exception):
            if not isinstance(error, KvpoolError):
                self.log.failed(error)
            return self.protocol.fail(error)
        return then(future.result())

    def _allocate(self, planned: Planned) -> Allocation:
        """Job: frees the current tensors and allocates those of a plan."""
        self._release()
        return self._cache.allocate(planned.config)

    def _release(self) -> None:
        """Job: has the runner drop its views, then frees the tensors, even if the hook fails."""
        if self._cache.allocation:
            try:
                self._hooks.on_release()
            finally:
                self._cache.release()

    def _begin_epoch(self, ready: Ready) -> None:
        """Job: makes the views, has the runner bind them, then admits steps."""
        config, kv_caches = self._cache.view(ready.num_blocks)
        pool = RankPool(
            ready.epoch,
            ready.num_blocks,
            config,
            ready.max_model_len,
            kv_caches,
            self._cache.buffers,
            ready.num_host_blocks,
        )
        self._hooks.on_epoch(pool)

        def admit() -> bool:
            if self.protocol.ready is not ready:
                return False  # the epoch has passed meanwhile
            self.fence.open(pool.epoch)
            return True

        if self.readiness.open(pool, admit):
            self.log.ready(ready, self._cache.allocated_bytes, self._device)
