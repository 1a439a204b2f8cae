"""`kvpool serve` with fault points armed: a real process that dies where it was told to."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.client import UnavailableError, connect
from support.server import pool_config
from support.workers import LoggingProcess

KVPOOL = [str(Path(sys.executable).parent / "kvpool")]


def test_an_unknown_point_keeps_the_server_from_starting() -> None:
    environment = {**os.environ, "KVPOOL_FAULTS": "step.aplied:kill:1"}
    command = [*KVPOOL, "serve", "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "'step.aplied' is no fault point" in done.stderr


def test_a_server_dies_after_a_change_and_before_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"unix:{tmp_path / 's'}"
    monkeypatch.setenv("KVPOOL_FAULTS", "step.applied:kill:2")
    server = LoggingProcess(*KVPOOL, "serve", "--listen", address)
    server.wait_for("fault points armed: for tests only.*step.applied:kill:2")
    server.wait_for("server listening")
    with connect(address, deadline_seconds=6.0) as client:
        client.create_pool(pool_config())
        session = client.open_session("m")
        request = session.request("r", range(20))
        assert session.admit(request)
        with pytest.raises(UnavailableError):
            session.free(request)
    assert server.end() == -signal.SIGKILL
