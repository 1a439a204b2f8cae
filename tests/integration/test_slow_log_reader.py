"""Commands whose stderr is a full pipe that no process reads for a while, or ever."""

import fcntl
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client import Client, NotFoundError, connect
from support import processes
from support.server import CommandLineServer, free_port, pool_config
from support.waiting import DEADLINE_SECONDS, wait_until

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


class Unread(CommandLineServer):
    """A server whose stderr is not read until a test does.

    Attributes:
        port: Port of its metrics.
        pipe: Its stderr.
    """

    def __init__(self, address: str) -> None:
        self.port = free_port()
        options = ("--metrics-listen", f"127.0.0.1:{self.port}", "--log-format", "json", "--log-level", "debug")
        program = (processes.PYTHON, "-c", _PROGRAM, str(CAPACITY_RECORDS))
        reading, writing = os.pipe()
        self.pipe = os.fdopen(reading, "rb")
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        super().__init__(address, options=options, command=program, stderr=writing, waits=False)
        os.close(writing)

    def dropped(self) -> int:
        """The metric of dropped records."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=DEADLINE_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return next(
            int(float(line.split()[1])) for line in lines if line.startswith("kvpool_log_records_dropped_total ")
        )


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path / 's'}"


@pytest.fixture
def server(address: str) -> Iterator[Unread]:
    with Unread(address) as server, server.pipe:
        wait_until(Path(address.removeprefix("unix:")).exists, "the server listens")
        yield server
        server.kill()


def make_records(client: Client) -> None:
    for _ in range(RECORDS):
        with pytest.raises(NotFoundError):
            client.open_session("unknown")


def test_a_paused_reader_costs_log_records_only(server: Unread, address: str) -> None:
    with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(pool_config())
        with client.open_session("m") as session:
            make_records(client)
            assert session.admit(session.request("r", list(range(10))))
    dropped = server.dropped()
    assert 0 < dropped < RECORDS
    messages = []
    for line in server.pipe:
        entry = json.loads(line)
        messages.append(entry["message"])
        if messages[-1] == "log records dropped":
            break
    assert entry["records"] == dropped
    assert (entry["level"], entry["logger"]) == ("WARNING", "kvpool.log")
    server.signal(signal.SIGTERM)
    rest = [json.loads(line)["message"] for line in server.pipe]
    assert rest[-1] == "server stopped"
    assert server.end() == 0


def test_an_exit_does_not_wait_for_a_reader(server: Unread, address: str) -> None:
    with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        make_records(client)
    assert server.stop() == 0
    os.set_blocking(server.pipe.fileno(), False)
    assert b"server listening" in (server.pipe.read() or b"")
