"""A run prints the processor time of its tests, and fails if one that is not slow exceeds the budget."""

import os
import sys
from pathlib import Path

import pytest

from support import processes

TESTS = """
import subprocess, sys, time
import pytest

def work():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.2: pass"], check=True)

def test_of_a_process(): work()

@pytest.mark.slow
def test_that_may_be_slow(): work()

def test_that_waits(): time.sleep(0.3)
"""


@pytest.mark.slow
def test_a_test_over_the_budget_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long")
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-p",
        "support.processor_time",
        "--processor-budget",
        "0.01",
        "-n",
        "1",
    ]
    done = processes.run(
        [*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    refused = [line.partition(" takes ")[0] for line in done.stdout.splitlines() if " takes " in line]
    assert refused == ["test_it.py::test_of_a_process"]
    assert " s test_it.py::test_that_may_be_slow\n" in done.stdout
