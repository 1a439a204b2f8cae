"""A plugin of pytest: a failed test shows the ends of the logs of its processes, and of those that ran before it."""

from collections.abc import Generator
from typing import Final

import pytest

from support.logging_process import started

_MAX_LINES: Final = 40


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forgets the processes of earlier tests, except those that still run, as servers of a whole file do."""
    started[:] = [process for process in started if process.is_alive]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds a section per process to the report of a failure."""
    report = yield
    if report.failed:
        for process in started:
            status = "running" if process.is_alive else f"ended with {process.process.returncode}"
            title = f"log of process {process.pid}, {status}: {' '.join(process.command)}"
            lines = process.earlier_lines + process.lines
            report.sections.append((title, "".join(lines[-_MAX_LINES:])))
    return report
