"""Commands whose stderr is a full pipe that no process reads for a while, or ever."""

import fcntl
import json
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from kvpool.client import Client, NotFoundError, connect
from support import processes
from support.server import free_port, pool_config
from support.wire_ranks import wait_until

CAPACITY_RECORDS = 50
PIPE_BYTES = 4096
RECORDS = 300
"""More than the queue and the pipe hold."""

_PROGRAM = """
import sys
from kvpool.wire import log_queue
log_queue.LogQueue.__init__.__defaults__ = (int(sys.argv[1]),)
from kvpool.cli import main
main(sys.argv[2:])
"""


class Unread:
    """A server whose stderr is not read until a test does.

    Attributes:
        process: The process.
        port: Port of its metrics.
        stderr: The pipe.
    """

    def __init__(self, address: str) -> None:
        self.port = free_port()
        command = ["serve", "--listen", address, "--metrics-listen", f"127.0.0.1:{self.port}", "--log-format", "json"]
        self.process = processes.start(
            [sys.executable, "-c", _PROGRAM, str(CAPACITY_RECORDS), *command, "--log-level", "debug"],
            stderr=processes.PIPE,
        )
        assert self.process.stderr
        self.stderr: IO[bytes] = self.process.stderr
        fcntl.fcntl(self.stderr, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def dropped(self) -> int:
        """The metric of dropped records."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return next(
            int(float(line.split()[1])) for line in lines if line.startswith("kvpool_log_records_dropped_total ")
        )


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path / 's'}"


@pytest.fixture
def server(address: str) -> Iterator[Unread]:
    server = Unread(address)
    wait_until(Path(address.removeprefix("unix:")).exists, "the server listens")
    yield server
    server.process.kill()
    server.process.wait()
    server.stderr.close()


def make_records(client: Client) -> None:
    for _ in range(RECORDS):
        with pytest.raises(NotFoundError):
            client.open_session("unknown")


def test_a_paused_reader_costs_log_records_only(server: Unread, address: str) -> None:
    with connect(address, deadline_seconds=10) as client:
        client.create_pool(pool_config())
        with client.open_session("m") as session:
            make_records(client)
            assert session.admit(session.request("r", list(range(10))))
    dropped = server.dropped()
    assert 0 < dropped < RECORDS
    messages = []
    for line in server.stderr:
        entry = json.loads(line)
        messages.append(entry["message"])
        if messages[-1] == "log records dropped":
            break
    assert entry["records"] == dropped
    assert (entry["level"], entry["logger"]) == ("WARNING", "kvpool.log")
    server.process.send_signal(signal.SIGTERM)
    rest = [json.loads(line)["message"] for line in server.stderr]
    assert rest[-1] == "server stopped"
    assert server.process.wait(30) == 0


def test_an_exit_does_not_wait_for_a_reader(server: Unread, address: str) -> None:
    with connect(address, deadline_seconds=10) as client:
        make_records(client)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    os.set_blocking(server.stderr.fileno(), False)
    assert b"server listening" in (server.stderr.read() or b"")
