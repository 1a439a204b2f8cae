"""Schedulers that share a pool, each in a process of its own, which ends with its parent.

One that dies is told apart from one that finished, and the others go on.
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
from kvpool.replay.playing import SchedulerOptions, scheduler_on
from kvpool.replay.result import Counts
from kvpool.replay.workload import Workload

_REPORT_EVERY: Final = 16


@dataclass(frozen=True, slots=True)
class Played:
    """What one scheduler did.

    Attributes:
        counts: What it counted.
        share: Its workload, as it is at the end.
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
    """Plays each share in a scheduler process of its own, all on one pool.

    Args:
        shares: What each plays.
        options: How.
        advance: Called with how many more requests are done with.
        complain: Called with a sentence about each scheduler that died.
        started: Called with the processes' ids.

    Returns:
        What each scheduler did; None for one that died.
    """
    children = [_start(share, options, f"kvpool-scheduler-{index}") for index, share in enumerate(shares)]
    held = deque(child.go for child in children)

    def let_go(count: int) -> None:
        for _ in range(min(count, len(held))):
            held.popleft().set()

    let_go(1 if options.start_after_requests else len(children))
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
                let_go(1)
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
        pipe: What it says.
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
    """What a scheduler says next: its end, how many more requests are done, or what went wrong; None if it is gone."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(pipe)
    go.wait()
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done == (options.start_after_requests or _REPORT_EVERY):  # how far it is
            pipe.send(done)
            done = 0

    try:
        with (
            connect_as(options.access, options.address) as client,
            scheduler_on(client, share, options, name, advance) as scheduler,
        ):
            counts = scheduler.run()
        pipe.send(done)
        pipe.send(Played(counts, share))
    except KvpoolError as error:
        pipe.send(f"{error.reason}: {error}")
        raise SystemExit(1) from None
