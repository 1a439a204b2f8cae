"""Latency of steps, and their cost for the server, with a growing number of concurrent sessions."""

import signal
import statistics
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from benchmarks.core_target import pool_config
from benchmarks.machine import processor_us
from benchmarks.race import Figures
from benchmarks.report import Run
from benchmarks.scale import Scale
from benchmarks.session_target import decode
from benchmarks.workloads import BLOCK_SIZE, VOCABULARY, Task
from kvpool.client import KvpoolError, Request, Session
from kvpool.client.connection import connect_as
from kvpool.replay import ChildError
from kvpool.replay.children import Pipe, child_process
from kvpool.wire.channels import ClientCredentials

_POOL: Final = "sessions"
_PROMPT_BLOCKS: Final = 2


def many_sessions(run: Run) -> None:
    """Measures each number of sessions in turn, several times."""
    scale = run.scale
    measured: dict[int, list[Figures]] = {count: [] for count in scale.sessions}
    with (
        connect_as(ClientCredentials(), run.server.addresses[0]) as client,
        processes(scale.session_processes) as pipes,
    ):
        client.create_pool(pool_config(_POOL, Task("none", scale.num_blocks)))
        for _ in range(scale.session_rounds):
            for count in scale.sessions:
                places = [Place(run.server.addresses[0], _POOL)] * count
                measured[count].append(decode_at_once(scale, pipes, places, [run.server.pid]))
                run.advance(1)
    for count, rounds in measured.items():
        run.report.sessions[str(count)] = {name: statistics.median(f[name] for f in rounds) for name in rounds[0]}
    one = run.report.sessions.get("1", {}).get("server_cpu_us_per_request")
    for figures in run.report.sessions.values():
        if one and "server_cpu_us_per_request" in figures:
            figures["server_cpu_ratio_to_1_session"] = figures["server_cpu_us_per_request"] / one


@dataclass(frozen=True, slots=True)
class Place:
    """Server and pool of a session.

    Attributes:
        address: Address of the server.
        pool: Name of the pool, which exists.
    """

    address: str
    pool: str


@dataclass(frozen=True, slots=True)
class _Share:
    """The sessions of one process.

    Attributes:
        places: The place of each session by number. Each session has a thread, and tokens depend on its number.
        num_requests: Running requests per session.
        seconds: Time to decode.
    """

    places: dict[int, Place]
    num_requests: int
    seconds: float


def decode_at_once(scale: Scale, pipes: Sequence[Pipe], places: Sequence[Place], pids: Collection[int]) -> Figures:
    """Decodes in one session per place, without pauses between steps.

    Args:
        scale: Number of requests, and time.
        pipes: The pipes of `processes`, which share the sessions.
        places: The place of each session.
        pids: Process ids of the servers.
    """
    used = pipes[: len(places)]
    for i, pipe in enumerate(used):
        share = {number: places[number] for number in range(i, len(places), len(pipes))}
        pipe.send(_Share(share, scale.session_requests, scale.session_seconds))
    for pipe in used:
        _receive(pipe)
    before_us = [processor_us(pid) for pid in pids]
    start = time.perf_counter()
    for pipe in used:
        pipe.send("go")
    micros = sorted(taken for pipe in used for taken in _receive(pipe))
    seconds = time.perf_counter() - start
    after_us = [processor_us(pid) for pid in pids]
    for pipe in used:
        pipe.send("close")
        _receive(pipe)
    figures = {
        "steps_per_second": len(micros) / seconds,
        "step_p50_us": statistics.median(micros),
        "step_p99_us": micros[int(len(micros) * 0.99)],
    }
    spent_us = [
        after - before
        for before, after in zip(before_us, after_us, strict=True)
        if before is not None and after is not None
    ]
    if len(spent_us) == len(pids):
        figures["server_cpu_us_per_step"] = sum(spent_us) / len(micros)
        figures["server_cpu_us_per_request"] = figures["server_cpu_us_per_step"] / scale.session_requests
    return figures


@contextmanager
def processes(count: int) -> Iterator[list[Pipe]]:
    """Yields the pipes of processes that play each share they receive, until their pipe is closed."""
    with ExitStack() as stack:
        children = [stack.enter_context(child_process("kvpool-sessions", _play_shares)) for _ in range(count)]
        yield [pipe for _, pipe in children]


def _receive(pipe: Pipe) -> list[float]:
    try:
        answer: list[float] | str = pipe.recv()
    except EOFError:
        raise ChildError("a process with sessions ended") from None
    if isinstance(answer, str):
        raise ChildError(f"a process with sessions: {answer}")
    return answer


def _play_shares(pipe: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with suppress(EOFError, OSError):  # the parent has ended
        while True:
            share: _Share = pipe.recv()
            try:
                _play(share, pipe)
            except KvpoolError as error:
                pipe.send(f"{error.reason}: {error}")


def _play(share: _Share, pipe: Pipe) -> None:
    """Opens the sessions, waits for a message, decodes, sends the times of steps, waits again, and closes them."""
    with ExitStack() as stack:
        decodings = []
        for number, place in share.places.items():
            client = stack.enter_context(connect_as(ClientCredentials(), place.address))
            session = stack.enter_context(client.open_session(place.pool))
            decodings.append(_Decoding(session, number, share.num_requests))
        pipe.send([])
        pipe.recv()
        threads = [threading.Thread(target=decoding.run, args=(share.seconds,)) for decoding in decodings]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failures = [decoding.failure for decoding in decodings if decoding.failure]
        pipe.send(failures[0] if failures else [taken for decoding in decodings for taken in decoding.micros])
        pipe.recv()
    pipe.send([])


class _Decoding:
    """One session that decodes without pauses.

    Attributes:
        micros: Time of each step in microseconds.
        failure: The error that ended it; empty without an error.
    """

    def __init__(self, session: Session, number: int, num_requests: int) -> None:
        self._session = session
        self._tokens = [number * num_requests + i for i in range(num_requests)]
        self._requests: list[Request] = []
        self.micros: list[float] = []
        self.failure = ""
        with session.step() as step:
            for i, token in enumerate(self._tokens):
                length = _PROMPT_BLOCKS * BLOCK_SIZE + i % BLOCK_SIZE
                prompt = [(token * 7919 + j) % VOCABULARY for j in range(length)]
                self._requests.append(session.request(f"r{i}", prompt))
                step.admit(self._requests[-1])

    def run(self, seconds: float) -> None:
        """Decodes for `seconds`."""
        end_seconds = time.monotonic() + seconds
        try:
            while time.monotonic() < end_seconds:
                start_ns = time.perf_counter_ns()
                new = decode(self._session, self._requests, self._tokens)
                self.micros.append((time.perf_counter_ns() - start_ns) / 1000)
                if None in new:
                    self.failure = "a decode found too few blocks"
                    return
        except KvpoolError as error:
            self.failure = f"{error.reason}: {error}"
