"""Schedulers that share a pool, each in its own process, which ends with its parent.

A scheduler that dies is reported. The others continue.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import Final, cast

from kvpool.client import KvpoolError
from kvpool.client.connection import connect_as
from kvpool.replay.children import CONTEXT, STOP_SECONDS, Pipe, child_process, end_with_parent
from kvpool.replay.result import Counts
from kvpool.replay.scheduler import Scheduler, SchedulerOptions, open_scheduler
from kvpool.replay.workload import Workload

_REPORT_EVERY: Final = 16
_CHECK_SECONDS: Final = 1.0
"""The interval at which a scheduler that waits for its turn checks whether another one died."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """Receives the progress of a replay.

    Attributes:
        advance: Called with the number of further requests that are done.
        complain: Called with a sentence about each failure.
    """

    advance: Callable[[int], object]
    complain: Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Played:
    """The result of one scheduler.

    Attributes:
        counts: Its counts.
        share: Its workload, in its final state.
    """

    counts: Counts
    share: Workload


class _Turns:
    """Lets schedulers play their rounds in turn, so that what they find cached does not depend on the machine's load.

    Attributes:
        is_broken: Set when a scheduler died, which may have had the turn: the others continue without turns.
    """

    def __init__(self, count: int) -> None:
        self._gates = [CONTEXT.Semaphore(0) for _ in range(count)]
        self._left = [CONTEXT.Event() for _ in range(count)]
        self.is_broken = CONTEXT.Event()
        self._gates[0].release()

    def wait(self, index: int) -> None:
        """Waits for the turn of a scheduler."""
        while not self._gates[index].acquire(timeout=_CHECK_SECONDS):
            if self.is_broken.is_set():
                return

    def pass_on(self, index: int) -> None:
        """Gives the turn to the next scheduler that still plays: the same one if it is the last."""
        count = len(self._gates)
        for following in (*range(index + 1, count), *range(index + 1)):
            if not self._left[following].is_set():
                self._gates[following].release()
                return

    def leave(self, index: int) -> None:
        """Ends the part of a scheduler that has the turn."""
        self._left[index].set()
        self.pass_on(index)


def play_concurrently(shares: Sequence[Workload], options: SchedulerOptions, reporter: Reporter) -> list[Played | None]:
    """Plays each share in its own scheduler process, all on one pool.

    Args:
        shares: The workload of each scheduler.
        options: The options of all schedulers.
        reporter: Receives the progress, and a sentence about each scheduler that died.

    Returns:
        The result of each scheduler; None for a scheduler that died.
    """
    events = [CONTEXT.Event() for _ in shares]
    turns = _Turns(len(shares)) if options.in_turn else None
    not_started = iter(events)
    played: list[Played | None] = [None] * len(shares)
    with ExitStack() as stack:
        processes = []
        open_pipes = {}
        for index, (share, event) in enumerate(zip(shares, events, strict=True)):
            process, pipe = stack.enter_context(
                child_process(_name(index), _schedule, share, options, _Place(index, event, turns))
            )
            processes.append(process)
            open_pipes[pipe] = index
        _set_next(not_started, 1 if options.start_after_requests else len(events))
        while open_pipes:
            for ready in wait(list(open_pipes)):
                pipe = cast("Pipe", ready)
                index = open_pipes[pipe]
                match _receive(pipe):
                    case Played() as result:
                        played[index] = result
                    case int(count):
                        reporter.advance(count)
                    case str(reason):
                        reporter.complain(f"scheduler {index}: {reason}")
                    case None:
                        del open_pipes[pipe]
                        if played[index] is None:
                            if turns:
                                turns.is_broken.set()
                            reporter.complain(f"scheduler {index} ended with {_ending(processes[index])}")
                _set_next(not_started, 1)
    return played


def _set_next(events: Iterator[Event], count: int) -> None:
    for event in islice(events, count):
        event.set()


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


def _name(index: int) -> str:
    return f"kvpool-scheduler-{index}"


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a scheduler among the others.

    Attributes:
        index: Its number.
        go: Set when it may start.
        turns: The turns of all schedulers; None if they play at the same time.
    """

    index: int
    go: Event
    turns: _Turns | None


def _schedule(share: Workload, options: SchedulerOptions, place: _Place, pipe: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(pipe)
    place.go.wait()
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
            open_scheduler(client, share, options, _name(place.index), advance) as scheduler,
        ):
            counts = _run_in_turn(scheduler, place.turns, place.index) if place.turns else scheduler.run()
        pipe.send(done)
        pipe.send(Played(counts, share))
    except KvpoolError as error:
        pipe.send(f"{error.reason}: {error}")
        raise SystemExit(1) from None


def _run_in_turn(scheduler: Scheduler, turns: _Turns, index: int) -> Counts:
    has_turn = False

    def wait_for_turn() -> bool:
        nonlocal has_turn
        if has_turn:
            turns.pass_on(index)
        turns.wait(index)
        has_turn = True
        return False

    counts = scheduler.run(wait_for_turn)
    turns.leave(index)
    return counts
