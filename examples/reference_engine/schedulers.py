"""Schedulers that share a pool, each in its own process, which ends with its parent.

A scheduler that dies is reported. The others continue.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import cast

from kvpool.client import Client, InvalidArgumentError, KvpoolError, Session, connect
from kvpool.replay.children import CONTEXT, STOP_SECONDS, Pipe, child_process, end_with_parent
from kvpool.replay.executor import Executor
from kvpool.replay.result import Counts
from kvpool.replay.scheduler import Scheduler
from kvpool.replay.workload import Workload


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Options of a scheduler process.

    Attributes:
        address: The service.
        pool: Name of the pool, which exists.
        max_num_seqs: Maximum number of running requests.
        max_num_batched_tokens: Maximum tokens of a round.
        open_executor: Opens the executor of a session.
        start_after_requests: Number of requests after which the next scheduler starts.
    """

    address: str
    pool: str
    max_num_seqs: int
    max_num_batched_tokens: int
    open_executor: Callable[[Session], AbstractContextManager[Executor]]
    start_after_requests: int


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
) -> list[Played | None]:
    """Plays each share in its own scheduler process, all on one pool.

    Args:
        shares: The workload of each scheduler.
        options: The options of all schedulers.
        advance: Called with the number of further requests that are done.
        complain: Called with a sentence about each scheduler that died.

    Returns:
        The result of each scheduler; None for a scheduler that died.
    """
    events = [CONTEXT.Event() for _ in shares]
    not_started = iter(events)
    played: list[Played | None] = [None] * len(shares)
    with ExitStack() as stack:
        processes = []
        open_pipes = {}
        for index, (share, event) in enumerate(zip(shares, events, strict=True)):
            process, pipe = stack.enter_context(child_process(_name(index), _schedule, share, options, index, event))
            processes.append(process)
            open_pipes[pipe] = index
        _set_next(not_started)
        while open_pipes:
            for ready in wait(list(open_pipes)):
                pipe = cast("Pipe", ready)
                index = open_pipes[pipe]
                match _receive(pipe):
                    case Played() as result:
                        played[index] = result
                    case int(count):
                        advance(count)
                    case str(reason):
                        complain(f"scheduler {index}: {reason}")
                    case None:
                        del open_pipes[pipe]
                        if played[index] is None:
                            complain(f"scheduler {index} ended with {_ending(processes[index])}")
                _set_next(not_started)
    return played


def _set_next(events: Iterator[Event]) -> None:
    for event in islice(events, 1):
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


def _schedule(share: Workload, options: SchedulerOptions, index: int, go: Event, pipe: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(pipe)
    go.wait()
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done == options.start_after_requests:
            pipe.send(done)
            done = 0

    try:
        with connect(options.address) as client:
            counts = _play(client, share, options, _name(index), advance)
        pipe.send(done)
        pipe.send(Played(counts, share))
    except KvpoolError as error:
        pipe.send(f"{error.reason}: {error}")
        raise SystemExit(1) from None


def _play(
    client: Client, share: Workload, options: SchedulerOptions, name: str, advance: Callable[[], object]
) -> Counts:
    with (
        client.open_session(options.pool, client_name=name, reserve_tokens=16) as session,
        options.open_executor(session) as executor,
    ):
        if session.config.num_host_blocks:
            raise InvalidArgumentError("pool", "it has host memory, and this engine makes no copies")
        scheduler = Scheduler(
            session,
            share,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            advance=advance,
            executor=executor,
        )
        return scheduler.run()
