"""Programs that end by SIGTERM leave no process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.etcd import needs_etcd
from support.programs import descendants

TESTS = Path(__file__).parents[1]
DEADLINE_SECONDS = 120.0
RUN = ["crash/run.py", "--schedulers", "2", "--ranks", "1"]
FAILOVER = ["crash/failover.py", "--requests", "1", "--etcd", "1", "--kinds", "stop"]
ATTACKS = ["attacks/run.py"]
SOAK = ["crash/soak.py", "--schedulers", "2"]


def is_alive(process: int) -> bool:
    """Whether a process has not ended. One that no other waits for is a zombie then."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    due = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < due
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        RUN,
        pytest.param([*RUN, "--cluster"], marks=[needs_etcd, pytest.mark.complete]),
        pytest.param(FAILOVER, marks=[needs_etcd, pytest.mark.complete]),
        pytest.param(ATTACKS, marks=pytest.mark.complete),
        pytest.param(SOAK, marks=pytest.mark.complete),
    ],
    ids=["run", "cluster", "failover", "attacks", "soak"],
)
def test_a_program_that_is_terminated_ends_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started: list[int] = []
    program = subprocess.Popen([sys.executable, *command], cwd=TESTS, stderr=subprocess.DEVNULL)
    try:
        until(lambda: len([*descendants(program.pid)]) > 1)  # a server, and another
        started = [*descendants(program.pid)]
        program.terminate()
        assert program.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
        until(lambda: not any(map(is_alive, started)))
    finally:
        for process in filter(is_alive, started):
            os.kill(process, signal.SIGKILL)
        program.kill()
        program.wait()
