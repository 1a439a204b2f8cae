"""The example of endless chats ends with its session, or at SIGTERM."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvpool.client import connect
from kvpool.client.admin import AdminClient
from support.logging_process import LoggingProcess
from support.paths import ROOT
from support.server import pool_config, running_server


@pytest.fixture
def address() -> Iterator[str]:
    with running_server() as address, connect(address) as client:
        client.create_pool(replace(pool_config(num_blocks=400), max_model_len=4096))
        yield address


@pytest.fixture
def chats(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoggingProcess]:
    monkeypatch.chdir(ROOT)
    program = LoggingProcess(sys.executable, "-m", "examples.chats", address, "m", "0")
    program.wait_for("a session on pool 'm', epoch 1")
    yield program
    program.kill()
    assert "Traceback" not in program.log


def test_it_frees_all_blocks_when_it_is_stopped(address: str, chats: LoggingProcess) -> None:
    assert chats.stop() == 0
    with connect(address) as client:
        info = client.get_pool("m")
    assert (info.sessions, info.requests, info.free_blocks) == (0, 0, 399)


def test_it_ends_with_its_session(address: str, chats: LoggingProcess) -> None:
    with AdminClient(address) as client:
        client.evict_session("m", next(client.sessions("m")).session_number)
    assert chats.end() == 1
    chats.wait_for("SESSION_EVICTED")
