"""A failed test shows the logs of its processes."""

import pytest

from support import processes

pytest_plugins = ["pytester"]

_TESTS = """
import sys
import pytest
from support.logging_process import LoggingProcess

PROGRAM = "import sys; [sys.stderr.write(f'{sys.argv[1]} {i}\\\\n') for i in range(int(sys.argv[2]))]; input()"

def started(name, count):
    process = LoggingProcess(sys.executable, "-c", PROGRAM, name, str(count), stdin=-1)
    process.wait_for(f"{name} {count - 1}")
    return process

@pytest.fixture(scope="module")
def shared():
    with started("shared", 3) as process:
        yield process

def test_passes(shared):
    started("unrelated", 1).kill()

def test_fails(shared):
    with started("own", 100):
        assert not shared
"""


@pytest.mark.slow
def test_a_failed_test_shows_the_ends_of_the_logs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", processes.environment()["PYTHONPATH"])
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_subprocess("-p", "support.process_logs", "-p", "xdist", "-n", "1")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*log of process *, running: *", "shared 0", "*, ended with -9: *", "own 60", "own 99"]
    )
    for absent in ("*unrelated*", "own 59"):
        result.stdout.no_fnmatch_line(absent)
