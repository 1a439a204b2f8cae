"""A process that closes the session of a scheduler whose process was killed; leases are much longer than the tests."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client import Client
from support import processes
from support.detached import detached_pids
from support.server import running_server
from support.waiting import wait_until

_SCHEDULER = """
import sys
from kvpool.client import connect
from kvpool.client.exit_watcher import ExitWatcher
address, pool = sys.argv[1:]
session = connect(address).open_session(pool, lease_seconds=3600)
watcher = ExitWatcher(address, session, 30.0)
session.admit(session.request("r", range(20)))
print("running", flush=True)
if sys.stdin.readline() == "close\\n":
    session.close()
    watcher.dismiss()
    print("closed", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server() as address:
        yield address


class Scheduler:
    """A scheduler with a watcher, in a process group of its own."""

    def __init__(self, address: str, pool: str, folder: Path) -> None:
        self._folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SCHEDULER, address, pool],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=processes.environment(KVPOOL_TEST_FOLDER=str(folder)),
        )
        assert self.read() == "running\n"

    def read(self) -> str:
        """Returns the next line that it writes."""
        assert self.process.stdout
        return self.process.stdout.readline()

    @property
    def watchers(self) -> list[int]:
        """Its watcher, while that runs."""
        return detached_pids("exit_watcher.py", "KVPOOL_TEST_FOLDER", str(self._folder))

    def kill(self, number: int) -> None:
        """Ends its process group by a signal."""
        os.killpg(self.process.pid, number)
        self.process.communicate()


@pytest.fixture
def scheduler(address: str, pool: str, tmp_path: Path) -> Iterator[Scheduler]:
    started = Scheduler(address, pool, tmp_path)
    yield started
    if started.process.poll() is None:
        started.kill(signal.SIGKILL)
    wait_until(lambda: not started.watchers)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_session_of_a_killed_scheduler_ends_before_its_lease(
    scheduler: Scheduler, client: Client, pool: str, number: int
) -> None:
    held = client.get_pool(pool)
    scheduler.kill(number)
    wait_until(lambda: not client.get_pool(pool).sessions)
    ended = client.get_pool(pool)
    assert (held.sessions, held.requests, held.free_blocks) == (1, 1, ended.free_blocks - 5)
    assert (ended.requests, ended.quarantined_blocks, ended.epoch) == (0, 0, held.epoch)


def test_signals_do_not_end_the_watcher(scheduler: Scheduler, client: Client, pool: str) -> None:
    (watcher,) = scheduler.watchers
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(watcher, number)
    scheduler.kill(signal.SIGKILL)
    wait_until(lambda: not client.get_pool(pool).sessions)


def test_a_closed_session_is_left_alone(scheduler: Scheduler, client: Client, pool: str) -> None:
    assert scheduler.process.stdin
    scheduler.process.stdin.write("close\n")
    scheduler.process.stdin.flush()
    assert scheduler.read() == "closed\n"
    wait_until(lambda: not scheduler.watchers)
    assert scheduler.process.poll() is None
    assert not client.get_pool(pool).sessions


def test_a_killed_watcher_leaves_the_scheduler_alone(scheduler: Scheduler, client: Client, pool: str) -> None:
    (watcher,) = scheduler.watchers
    os.kill(watcher, signal.SIGKILL)
    wait_until(lambda: not scheduler.watchers)
    assert client.get_pool(pool).sessions == 1
    assert scheduler.process.stdin
    scheduler.process.stdin.write("close\n")
    scheduler.process.stdin.flush()
    assert scheduler.read() == "closed\n"
    assert not client.get_pool(pool).sessions
