"""A rank: joins its pool in threads of its own, and holds its memory."""

import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Generic, Self, TypeVar

import torch

from kvpool.core.errors import KvpoolError
from kvpool.core.ids import TableLease
from kvpool.core.ranks.messages import DeclaredMemory, Rank, Registration
from kvpool.core.specs.base import KVCacheSpec
from kvpool.gpu_worker.device import describe_device
from kvpool.gpu_worker.rank_loop import RankLoop
from kvpool.gpu_worker.rank_pool import RankCache, RankPool, WorkerHooks
from kvpool.gpu_worker.rank_protocol import RankFence
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import WorkerStatus, WorkerUsage
from kvpool.wire.errors import DeadlineError

_FenceT = TypeVar("_FenceT", bound=RankFence)


@contextmanager
def _on_signals(numbers: tuple[signal.Signals, ...], call: Callable[[], None]) -> Iterator[None]:
    """Calls `call` on each of the signals. The call must be reentrant, as `SimpleQueue.put` is."""
    before = {number: signal.signal(number, lambda *_: call()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rank_registration(
    settings: WorkerSettings,
    device: torch.device,
    *,
    available_bytes: int,
    layers: Mapping[str, KVCacheSpec],
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

    def __init__(
        self,
        settings: WorkerSettings,
        registration: Registration,
        *,
        cache: RankCache,
        fence: Callable[[Callable[[], None]], _FenceT],
        hooks: WorkerHooks,
    ) -> None:
        """Does not join the pool.

        Args:
            settings: The rank, its pool and its device.
            registration: What the rank registers with; describes memory that the cache holds from an earlier process.
            cache: The memory.
            fence: Makes the fence, given a function for it to call when stale steps have ended.
            hooks: Callbacks of the runner.
        """
        self._available_bytes = registration.available_bytes
        self._cache = cache
        self._loop = RankLoop(settings, registration, cache, fence, hooks)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Worker {self._loop.name}: {self.status.phase.value}, epoch {self.status.epoch}>"

    @property
    def is_over(self) -> bool:
        """Whether the rank has ended, by itself or by request. It holds no memory, unless it was abandoned."""
        return self._loop.readiness.is_over

    @property
    def status(self) -> WorkerStatus:
        """The current status of the rank."""
        return self._loop.status

    @property
    def usage(self) -> WorkerUsage:
        """Memory, stream and step counts of the rank."""
        protocol = self._loop.protocol
        answered = protocol.answered_seconds
        return WorkerUsage(
            self._available_bytes,
            self._cache.allocated_bytes,
            protocol.num_joins,
            protocol.num_answers,
            None if answered is None else time.time() - (time.monotonic() - answered),
            self._loop.fence.num_in_flight,
        )

    def start(self) -> None:
        """Joins the pool in threads of the worker, and joins again after errors, until `close`."""
        if self._thread:
            raise RuntimeError("the worker was started before")
        self._thread = threading.Thread(target=self._run_in_thread, name=f"kvpool-{self._loop.name}", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Joins the pool, and joins again after errors, until SIGTERM or SIGINT; then leaves. For the main thread.

        Raises:
            KvpoolError: The server refused the rank permanently, or fewer than two blocks fit the device.
        """
        with _on_signals((signal.SIGTERM, signal.SIGINT), lambda: self._loop.put(self._loop.protocol.leave)):
            self._loop.run()
        if failure := self._loop.readiness.failure:
            raise failure

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
            raise DeadlineError("NOT_READY", f"{self._loop.name} is not ready: {self.status.describe()}")
        return ready.result()

    def ready(self) -> Future[RankPool]:
        """The pool once it is open, or the error that `wait_ready` raises, without a deadline. May be cancelled."""
        return self._loop.readiness.future()

    def close(self) -> None:
        """Leaves the pool, frees the tensors, and waits for both. Hooks must not call this."""
        if self._thread:
            self._loop.put(self._loop.protocol.leave)
            self._thread.join()

    def abandon(self) -> None:
        """Ends the rank without leaving the pool, and keeps the memory for a later process. Waits for both."""
        if self._thread:
            self._loop.put(self._loop.protocol.abandon)
            self._thread.join()

    def report_gone(self, leases: Collection[TableLease]) -> None:
        """Reports sessions whose processes have exited, so that they end at once and not with their lease."""
        self._loop.put(lambda: self._loop.protocol.sessions_gone(leases))

    def _run_in_thread(self) -> None:
        loop = self._loop
        try:
            loop.run()
        except Exception as error:  # noqa: BLE001 - thread boundary: logged, and raised in `wait_ready`
            loop.log.failed(error)
        else:
            if isinstance(loop.readiness.failure, KvpoolError):
                loop.log.failed(loop.readiness.failure)
