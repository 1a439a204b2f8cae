"""Programs that end by SIGTERM leave no process."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.etcd import needs_etcd
from support.waiting import DEADLINE_SECONDS, wait_until

TESTS = Path(__file__).parents[1]
RUN = ["crash/run.py", "--schedulers", "2", "--ranks", "1"]
FAILOVER = ["crash/failover.py", "--requests", "1", "--etcd", "1", "--kinds", "stop"]
ATTACKS = ["attacks/run.py"]
SOAK = ["crash/soak.py", "--schedulers", "2"]


def processes_in(folder: Path) -> list[int]:
    """The processes that have a folder for temporary files."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            if f"TMPDIR={folder}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


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
        wait_until(lambda: len(processes_in(tmp_path)) > 3)
        program.terminate()
        assert program.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
        wait_until(lambda: not processes_in(tmp_path))
    finally:
        for process in processes_in(tmp_path):
            os.kill(process, signal.SIGKILL)
        program.kill()
        program.wait()
