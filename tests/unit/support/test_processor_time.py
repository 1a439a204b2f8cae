"""A run prints the processor time of its tests, that of their processes included."""

import os
import re
import sys
from pathlib import Path

import pytest

from support import processes

TESTS = """
import subprocess, sys, time

def test_of_a_process():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.2: pass"], check=True)

def test_that_waits(): time.sleep(0.3)
"""


@pytest.mark.slow
def test_a_run_prints_what_its_tests_take(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "support.processor_time", "-n", "1"]
    done = processes.run(
        [*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    taken = {test: float(seconds) for seconds, test in re.findall(r"([\d.]+) s (test_it.py::\w+)\n", done.stdout)}
    assert taken["test_it.py::test_of_a_process"] >= 0.2
    assert taken["test_it.py::test_that_waits"] < taken["test_it.py::test_of_a_process"]
