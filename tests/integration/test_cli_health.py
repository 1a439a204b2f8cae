"""`kvpool health`, as container health checks run it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command import kvpool
from support.server import ServerProcess
from support.waiting import DEADLINE_SECONDS


def health(*arguments: str) -> tuple[int, str]:
    """Runs the command; returns its exit status and its last line."""
    done = kvpool("health", *arguments)
    return done.returncode, (done.stdout + done.stderr).splitlines()[-1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(f"unix:{tmp_path}/s") as server:
        yield server
    assert " WARNING " not in server.log


def test_a_server_serves_until_it_stops(server: ServerProcess) -> None:
    (address,) = server.addresses
    assert health(address) == health("--address", address) == (0, f"{address}: SERVING")
    assert health(address, "--service", "kvpool.v1.WorkerService") == (0, f"{address}: SERVING")
    assert health(address, "--service", "missing") == (1, f"Error: {address}: it has no service 'missing'")
    server.pause()
    assert health(address, "--timeout-seconds", "0.3") == (1, f"Error: {address}: no answer within 0.3 s")
    server.resume()
    server.stop_cleanly()
    status, line = health(address)
    assert (status, line.startswith(f"Error: {address}: UNAVAILABLE: ")) == (1, True), line


def test_the_environment_can_hold_the_address(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    (address,) = server.addresses
    monkeypatch.setenv("KVPOOL_ADDRESS", address)
    assert health() == (0, f"{address}: SERVING")
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/nowhere/s")
    assert health(address) == (0, f"{address}: SERVING")


def test_the_default_address_is_that_of_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_ADDRESS", raising=False)
    assert "[env var: KVPOOL_ADDRESS; default: 127.0.0.1:50051]" in " ".join(kvpool("health", "--help").stdout.split())


def test_of_several_servers_one_that_serves_suffices(server: ServerProcess) -> None:
    (address,) = server.addresses
    assert health(f"unix:/nowhere/s,{address}")[0] == health(f"{address},unix:/nowhere/s")[0] == 0
    status, line = health("unix:/nowhere/r,unix:/nowhere/s")
    assert (status, line.startswith("Error: unix:/nowhere/s: UNAVAILABLE: ")) == (1, True), line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "address 'nowhere': needs host:port or unix:/path"),
        (["localhost:1", "--timeout-seconds", "0"], "0.0 is not in the range 0<x<=3600"),
        (["http://localhost:1"], "address 'http://localhost:1': needs host:port, without http://"),
        (["--address", "nowhere"], "--address: address 'nowhere': needs host:port or unix:/path"),
    ],
)
def test_bad_input_is_refused_on_one_line(arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_ADDRESS", raising=False)
    status, line = health(*arguments)
    assert (status, words in line) == (2, True), line


def test_health_imports_only_what_it_needs() -> None:
    program = "import sys, kvpool.cli.health; print(*[name for name in sys.modules if name.startswith('kvpool.')])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS
    )
    loaded = set(done.stdout.split())
    assert "kvpool.cli.health" in loaded
    assert not loaded & {
        "kvpool.client",
        "kvpool.server.app",
        "kvpool.core.blocks.kv_cache_manager",
        "kvpool.replay.play",
    }
