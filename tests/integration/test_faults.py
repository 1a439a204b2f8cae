"""A server process that kills itself at an armed fault point."""

import signal
from pathlib import Path

import pytest

from kvpool.client import UnavailableError, connect
from support.server import CommandLineServer, pool_config


def test_an_unknown_fault_point_is_refused_at_start() -> None:
    server = CommandLineServer("127.0.0.1:0", faults="step.aplied:kill:1", waits=False)
    assert server.end() == 1
    assert "'step.aplied' is not a fault point" in server.log


def test_a_server_dies_between_a_change_and_its_answer(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    server = CommandLineServer(address, faults="step.applied:kill:2")
    with connect(address, deadline_seconds=6.0) as client:
        client.create_pool(pool_config())
        session = client.open_session("m")
        request = session.request("r", range(20))
        assert session.admit(request)
        with pytest.raises(UnavailableError):
            session.free(request)
    assert server.end() == -signal.SIGKILL
