"""Programs that end by SIGTERM leave no process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.etcd import needs_etcd

TESTS = Path(__file__).parents[1]
DEADLINE_SECONDS = 30.0
RUN = ["crash/run.py", "--schedulers", "2", "--ranks", "1"]
FAILOVER = ["crash/failover.py", "--requests", "1", "--etcd", "1", "--kinds", "stop"]
ATTACKS = ["attacks/run.py"]
SOAK = ["crash/soak.py", "--schedulers", "2"]


def processes_in(folder: Path) -> list[int]:
    """The processes whose command lines name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


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
    program = subprocess.Popen([sys.executable, *command], cwd=TESTS, stderr=subprocess.DEVNULL)
    try:
        until(lambda: bool(processes_in(tmp_path)))
        program.terminate()
        assert program.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
        until(lambda: not processes_in(tmp_path))
    finally:
        for process in processes_in(tmp_path):
            os.kill(process, signal.SIGKILL)
        program.kill()
        program.wait()
