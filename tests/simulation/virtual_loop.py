"""An event loop in virtual time, and the simulated processes whose callbacks it runs.

1. The loop never waits: when no callback is ready, time advances to the next timer. No thread, socket or real clock.
2. Every callback belongs to the process in whose context it was created, or to none (the network, the faults).
3. The callbacks of a stopped process (SIGSTOP), including timers, are kept until it continues. A killed process never
   runs again, not even its `finally` blocks.
4. Each process has a clock of its own, that starts anywhere and runs a little fast or slow, but never back. The loop's
   `time` is that of the process that asks.
"""

import asyncio
import contextlib
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Self, TypeVar, cast

_T = TypeVar("_T")


class Killed(BaseException):
    """Raised where a process is killed in the middle of an action."""


class Process:
    """A simulated process.

    Attributes:
        name: Name in traces.
        start_seconds: Its clock at time 0.
        rate: Speed of its clock; 1 is exact.
        is_stopped: Whether it is stopped.
        is_dead: Whether it was killed.
        on_death: Called when it is killed, for the kernel's actions such as resetting connections.
    """

    def __init__(self, loop: "VirtualLoop", name: str, start_seconds: float = 0.0, rate: float = 1.0) -> None:
        self.name = name
        self.start_seconds = start_seconds
        self.rate = rate
        self.is_stopped = False
        self.is_dead = False
        self.on_death: list[Callable[[], None]] = []
        self._loop = loop
        self._kept: list[VirtualHandle] = []

    def __repr__(self) -> str:
        return self.name

    def start(self, main: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Runs a coroutine in this process."""
        context = Context()
        context.run(_PROCESS.set, self)
        return self._loop.create_task(main, context=context)

    def run(self, callback: Callable[..., object], *args: object) -> None:
        """Runs a callback in this process, for example when a message arrives."""
        context = Context()
        context.run(_PROCESS.set, self)
        self._loop.call_soon(callback, *args, context=context)

    def keep(self, handle: "VirtualHandle") -> None:
        """Keeps a callback until the process continues."""
        self._kept.append(handle)

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        self.is_stopped = False
        kept, self._kept = self._kept, []
        self._loop.ready.extend(kept)

    def kill(self) -> None:
        """SIGKILL."""
        self.is_dead = True
        self._kept.clear()
        for callback in self.on_death:
            callback()


_PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
_OUTSIDE = Context()


def current_process() -> Process | None:
    """The current process; None for the network and the faults."""
    return _PROCESS.get()


class VirtualHandle:
    """A scheduled callback."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "process", "when_seconds")

    def __init__(
        self, callback: Callable[..., object], args: tuple[object, ...], context: Context, when_seconds: float
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.process: Process | None = context.get(_PROCESS)
        self.when_seconds = when_seconds
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancels the callback."""
        self.is_cancelled = True

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self.is_cancelled

    def when(self) -> float:
        """Due time, in true time."""
        return self.when_seconds


class VirtualLoop:
    """The event loop, without files, processes or signals.

    Attributes:
        now_seconds: True time.
        num_turns: Number of callbacks run.
        ready: Callbacks to run now, in order.
        errors: Errors in callbacks and tasks of living processes.
        create_server: See `asyncio`; of the simulated network, see `ByteStreams`.
        create_connection: See `create_server`.
    """

    def __init__(self) -> None:
        self.create_server: Callable[..., Coroutine[Any, Any, Any]]
        self.create_connection: Callable[..., Coroutine[Any, Any, Any]]
        self.now_seconds = 0.0
        self.num_turns = 0
        self.ready: deque[VirtualHandle] = deque()
        self.errors: list[str] = []
        self._timers: list[tuple[float, int, VirtualHandle]] = []
        self._num_timers = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._is_over = False
        self._as_loop = cast("asyncio.AbstractEventLoop", self)

    def __enter__(self) -> Self:
        events._set_running_loop(self._as_loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for task in self._tasks:  # their clean-up is not part of the schedule
            if task.done():
                task._log_traceback = False
            else:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(BaseException):
                    cast("Coroutine[Any, Any, object]", task.get_coro()).close()
        self._tasks.clear()
        events._set_running_loop(None)

    def run_until(self, is_done: Callable[[], bool], limit_seconds: float) -> bool:
        """Runs until a condition holds; False at a timeout, or if nothing is left to do."""
        ready, timers = self.ready, self._timers
        while not is_done():
            if not ready:
                if not timers or timers[0][0] > limit_seconds:
                    return False
                when_seconds, _, handle = heapq.heappop(timers)
                self.now_seconds = max(self.now_seconds, when_seconds)
                ready.append(handle)
            self._run(ready.popleft())
        return True

    def task_errors(self) -> list[str]:
        """Exceptions of failed tasks that no caller retrieved."""
        failed = [task for task in self._tasks if task.done() and task._log_traceback]
        errors = [task.exception() for task in failed]
        return [repr(error) for error in errors if isinstance(error, Exception)]

    def _run(self, handle: VirtualHandle) -> None:
        process = handle.process
        if handle.is_cancelled:
            return
        if process is not None:
            if process.is_dead:
                return
            if process.is_stopped:
                process.keep(handle)
                return
        self.num_turns += 1
        try:  # not contextlib.suppress, which takes longer than many callbacks
            handle.context.run(handle.callback, *handle.args)
        except Killed:
            return

    def time(self) -> float:
        """Time by the clock of the calling process."""
        process = _PROCESS.get()
        return self.now_seconds if process is None else process.start_seconds + self.now_seconds * process.rate

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio`."""
        handle = VirtualHandle(callback, args, context or copy_context(), self.now_seconds)
        if not self._is_over:
            self.ready.append(handle)
        return cast("asyncio.Handle", handle)

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio`; `when` is by the clock of the calling process."""
        return self.call_later(when - self.time(), callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio`."""
        process = _PROCESS.get()
        delay_seconds = max(delay if process is None else delay / process.rate, 0.0)
        handle = VirtualHandle(callback, args, context or copy_context(), self.now_seconds + delay_seconds)
        self._num_timers += 1
        if not self._is_over:
            heapq.heappush(self._timers, (handle.when_seconds, self._num_timers, handle))
        return cast("asyncio.TimerHandle", handle)

    def call_outside(self, when_seconds: float, callback: Callable[..., object], *args: object) -> None:
        """Calls back at a true time, outside any process."""
        self._num_timers += 1
        heapq.heappush(
            self._timers, (when_seconds, self._num_timers, VirtualHandle(callback, args, _OUTSIDE, when_seconds))
        )

    def create_future(self) -> "asyncio.Future[Any]":
        """See `asyncio`."""
        return asyncio.Future(loop=self._as_loop)

    def create_task(
        self, coro: Coroutine[Any, Any, _T], *, name: str | None = None, context: Context | None = None
    ) -> "asyncio.Task[_T]":
        """See `asyncio`."""
        task = asyncio.Task(coro, loop=self._as_loop, name=name, context=context)
        self._tasks.append(task)
        return task

    def run_in_executor(self, _executor: object, func: Callable[..., _T], *args: object) -> "asyncio.Future[_T]":
        """Runs the function immediately."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - passed to the caller
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Collects errors reported by asyncio."""
        error = context.get("exception")
        is_meant = "destroyed" in context["message"] or (error and not isinstance(error, Exception))
        if not self._is_over and not is_meant:
            self.errors.append(f"{context['message']}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        """See `asyncio`."""
        return False

    def is_running(self) -> bool:
        """See `asyncio`."""
        return not self._is_over

    def is_closed(self) -> bool:
        """See `asyncio`."""
        return self._is_over
