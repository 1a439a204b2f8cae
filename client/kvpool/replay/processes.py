"""Schedulers that share a pool, each in its own process, which ends with its parent.

A scheduler that dies is reported. The others continue.
"""

import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import Final, cast

from kvpool.client import KvpoolError
from kvpool.client.connection import connect_as
from kvpool.replay.children import CONTEXT, STOP_SECONDS, Pipe, end_with_parent
from kvpool.replay.result import Counts
from kvpool.replay.scheduler import SchedulerOptions, open_scheduler
from kvpool.replay.workload import Workload

_REPORT_EVERY: Final = 16


@dataclass(frozen=True, slots=True)
class Played:
    """The result of one scheduler.

    Attributes:
        counts: Its counts.
        share: Its workload, in its final state.
    """

    counts: Counts
    share: Workload


def play_concurrently(
    shares: Sequence[Workload],
    options: SchedulerOptions,
    advance: Callable[[int], object],
    complain: Callable[[str], object],
    started: Callable[[list[int]], object] = lambda _: None,
) -> list[Played | None]:
    """Plays each share in its own scheduler process, all on one pool.

    Args:
        shares: The workload of each scheduler.
        options: The options of all schedulers.
        advance: Called with the number of further requests that are done.
        complain: Called with a sentence about each scheduler that died.
        started: Called with the process ids.

    Returns:
        The result of each scheduler; None for a scheduler that died.
    """
    children = [_start(share, options, f"kvpool-scheduler-{index}") for index, share in enumerate(shares)]
    waiting = deque(child.go for child in children)

    def start_next(count: int) -> None:
        for _ in range(min(count, len(waiting))):
            waiting.popleft().set()

    start_next(1 if options.start_after_requests else len(children))
    started([child.process.pid or 0 for child in children])
    played: list[Played | None] = [None] * len(shares)
    open_pipes = {child.pipe: index for index, child in enumerate(children)}
    try:
        while open_pipes:
            for ready in wait(list(open_pipes)):
                pipe = cast("Pipe", ready)
                index = open_pipes[pipe]
                message = _receive(pipe)
                if isinstance(message, Played):
                    played[index] = message
                elif isinstance(message, int):
                    advance(message)
                elif message is not None:
                    complain(f"scheduler {index}: {message}")
                else:
                    del open_pipes[pipe]
                    if played[index] is None:
                        complain(f"scheduler {index} ended with {_ending(children[index].process)}")
                start_next(1)
    finally:
        for child in children:
            child.pipe.close()
            child.process.terminate()
            child.process.join(STOP_SECONDS)
    return played


@dataclass(frozen=True, slots=True)
class _Child:
    """A scheduler process.

    Attributes:
        process: The process.
        pipe: Receives its messages.
        go: Set when it may begin.
    """

    process: SpawnProcess
    pipe: Pipe
    go: Event


def _start(share: Workload, options: SchedulerOptions, name: str) -> _Child:
    here, there = CONTEXT.Pipe()
    go = CONTEXT.Event()
    process = CONTEXT.Process(target=_schedule, args=(share, options, name, there, go), name=name, daemon=True)
    process.start()
    there.close()
    return _Child(process, here, go)


def _receive(pipe: Pipe) -> Played | int | str | None:
    """Receives a message: the result, a number of further requests that are done, or an error; None if it ended."""
    try:
        message: Played | int | str = pipe.recv()
    except EOFError:
        return None
    return message


def _ending(process: SpawnProcess) -> str:
    process.join(STOP_SECONDS)
    code = process.exitcode
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _schedule(share: Workload, options: SchedulerOptions, name: str, pipe: Pipe, go: Event) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(pipe)
    go.wait()
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done == (options.start_after_requests or _REPORT_EVERY):
            pipe.send(done)
            done = 0

    try:
        with (
            connect_as(options.access, options.address, options.deadline_seconds) as client,
            open_scheduler(client, share, options, name, advance) as scheduler,
        ):
            counts = scheduler.run()
        pipe.send(done)
        pipe.send(Played(counts, share))
    except KvpoolError as error:
        pipe.send(f"{error.reason}: {error}")
        raise SystemExit(1) from None
