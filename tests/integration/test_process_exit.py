"""The session of a process that exits, however it does: over a unix socket it ends at once; all leases are an hour."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool.client import connect
from support import processes
from support.server import pool_config, server_process
from support.waiting import wait_until

_SCHEDULER = """
import os, socket, sys, time
from kvpool.client import connect
address, pool, mode = sys.argv[1:]
client = connect(address)
session = client.open_session(pool, lease_seconds=3600)
session.admit(session.request("r", range(20)))
if mode == "fork" and not os.fork():  # the child inherits the link
    time.sleep(3600)
if mode == "pass":
    socket.send_fds(socket.socket(fileno=0), [b"x"], [session._calls._call.fileno()])
if mode == "close":
    client.close()
print("running", flush=True)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    with server_process() as first, server_process("127.0.0.1:0") as second:
        yield [*first.addresses, *second.addresses]


class Scheduler:
    """A scheduler with a session of one request, in a process group of its own."""

    def __init__(self, address: str, pool: str, mode: str = "", stdin: Any = subprocess.DEVNULL) -> None:
        self.client = connect(address)
        self.pool = pool
        self.client.create_pool(pool_config(pool))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SCHEDULER, address, pool, mode],
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=processes.environment(),
        )

    def wait(self) -> None:
        """Waits until it has its session."""
        assert self.process.stdout
        assert self.process.stdout.readline() == "running\n"

    @property
    def num_sessions(self) -> int:
        """Open sessions of the pool."""
        return self.client.get_pool(self.pool).sessions

    def end(self) -> None:
        """Ends everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.client.close()


@pytest.fixture
def start(addresses: list[str], pool_name: str) -> Iterator[Callable[..., Scheduler]]:
    started: list[Scheduler] = []

    def start(mode: str = "", stdin: Any = subprocess.DEVNULL, *, tcp: bool = False) -> Scheduler:
        started.append(Scheduler(addresses[tcp], pool_name, mode, stdin))
        started[-1].wait()
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.mark.parametrize("mode", ["", "fork", "close"])
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_the_session_of_a_killed_process_ends_before_its_lease(
    start: Callable[..., Scheduler], mode: str, number: int
) -> None:
    scheduler = start(mode)
    held = scheduler.client.get_pool(scheduler.pool)
    os.kill(scheduler.process.pid, number)
    wait_until(lambda: not scheduler.num_sessions)
    ended = scheduler.client.get_pool(scheduler.pool)
    assert (held.sessions, held.requests) == (1, 1)
    assert (ended.requests, ended.quarantined_blocks, ended.epoch) == (0, 5, held.epoch)


def test_a_passed_link_belongs_to_the_process_that_made_it(start: Callable[..., Scheduler]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        scheduler = start("pass", theirs)
        _, files, _, _ = socket.recv_fds(ours, 1, 1)
        scheduler.process.kill()
        wait_until(lambda: not scheduler.num_sessions)
        os.close(*files)


def test_a_stopped_process_keeps_its_session(start: Callable[..., Scheduler]) -> None:
    scheduler = start()
    scheduler.process.send_signal(signal.SIGSTOP)
    scheduler.client.get_pool(scheduler.pool)
    assert scheduler.num_sessions == 1
    scheduler.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not scheduler.num_sessions)


def test_over_tcp_the_lease_ends_a_session(start: Callable[..., Scheduler]) -> None:
    scheduler = start(tcp=True)
    scheduler.process.kill()
    scheduler.process.wait()
    assert scheduler.num_sessions == 1
