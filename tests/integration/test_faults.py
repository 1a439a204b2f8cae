"""A server process that kills itself at an armed fault point."""

import os
import signal
from pathlib import Path

import pytest

from kvpool.client import UnavailableError, connect
from support import faults, processes
from support.server import pool_config
from support.workers import LoggingProcess


def test_an_unknown_fault_point_is_refused_at_start() -> None:
    environment = {**os.environ, **faults.environment("step.aplied:kill:1")}
    command = [*faults.COMMAND, "serve", "--listen", "127.0.0.1:0"]
    done = processes.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "'step.aplied' is not a fault point" in done.stderr


def test_a_server_dies_between_a_change_and_its_answer(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    server = LoggingProcess(
        *faults.COMMAND, "serve", "--listen", address, environment=faults.environment("step.applied:kill:2")
    )
    server.wait_for("server listening")
    with connect(address, deadline_seconds=6.0) as client:
        client.create_pool(pool_config())
        session = client.open_session("m")
        request = session.request("r", range(20))
        assert session.admit(request)
        with pytest.raises(UnavailableError):
            session.free(request)
    assert server.end() == -signal.SIGKILL
