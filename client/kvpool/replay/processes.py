"""Real processes: a server of one's own, and schedulers that share a pool.

1. Every child ends with its parent, however that ends: each watches its end of a pipe.
2. A child that dies is told apart from one that finished, and the others go on.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias, cast

from kvpool.client import KvpoolError
from kvpool.client.connection import connect_as
from kvpool.replay.child_error import ChildError
from kvpool.replay.playing import SchedulerOptions, scheduler_on
from kvpool.replay.result import Counts
from kvpool.replay.workload import Workload
from kvpool.server.config import ServerConfig
from kvpool.server.server import serve

_Pipe: TypeAlias = "Connection[Any, Any]"

_CONTEXT: Final = multiprocessing.get_context("spawn")
_STOP_SECONDS: Final = 15.0
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


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """Runs a server in a process of its own on a unix socket; yields its address.

    Raises:
        ChildError: It did not start.
    """
    with TemporaryDirectory(prefix="kvpool-") as folder:
        address = f"unix:{Path(folder) / 'socket'}"
        here, there = _CONTEXT.Pipe()
        child = _CONTEXT.Process(target=_serve, args=(address, there), name="kvpool-server", daemon=True)
        child.start()
        there.close()
        try:
            _await_ready(here)
            yield address
        finally:
            child.terminate()
            child.join(_STOP_SECONDS)
            if child.is_alive():
                child.kill()
                child.join()
            here.close()


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
                pipe = cast("_Pipe", ready)
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
            child.process.join(_STOP_SECONDS)
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
    pipe: _Pipe
    go: Event


def _start(share: Workload, options: SchedulerOptions, name: str) -> _Child:
    here, there = _CONTEXT.Pipe()
    go = _CONTEXT.Event()
    process = _CONTEXT.Process(target=_schedule, args=(share, options, name, there, go), name=name, daemon=True)
    process.start()
    there.close()
    return _Child(process, here, go)


def _receive(pipe: _Pipe) -> Played | int | str | None:
    """What a scheduler says next: its end, how many more requests are done, or what went wrong; None if it is gone."""
    try:
        message: Played | int | str = pipe.recv()
    except EOFError:
        return None
    return message


def _ending(process: SpawnProcess) -> str:
    process.join(_STOP_SECONDS)
    code = process.exitcode
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _await_ready(pipe: _Pipe) -> None:
    try:
        answer = pipe.recv()
    except EOFError:
        raise ChildError("the server process ended before it listened") from None
    if answer is not None:
        raise ChildError(f"the server could not start: {answer}")


def _end_with_parent(pipe: _Pipe) -> None:
    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()  # the parent sends nothing: this returns when it is gone
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _serve(address: str, pipe: _Pipe) -> None:
    logging.basicConfig(level=logging.ERROR)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle

    def ready(_: list[str]) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pipe.send(None)
        _end_with_parent(pipe)

    try:
        asyncio.run(serve(ServerConfig(addresses=(address,), grace_seconds=1.0), ready))
    except OSError as error:
        pipe.send(str(error))


def _schedule(share: Workload, options: SchedulerOptions, name: str, pipe: _Pipe, go: Event) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent(pipe)
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
