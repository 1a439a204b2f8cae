"""Processor time of tests, their processes included: a summary at the end of each run.

It fails no run: the same test takes several times as long on one machine as on another.
"""

import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

from support.programs import descendants

_NUM_DEAREST: Final = 10
_PROPERTY: Final = "processor_seconds"
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_BEGAN: Final = pytest.StashKey[float]()


def used_seconds() -> float:
    """Processor time of this process and its descendants, ended or not."""
    return sum(os.times()[:4]) + sum(map(_used_by, descendants(os.getpid())))


def _used_by(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has just ended: its parent has its time
        return 0.0
    ticks = stat[stat.rindex(")") :].split()[12:16]
    return sum(map(int, ticks)) / _TICKS_PER_SECOND


class Bill:
    """Plugin that adds up what the tests of a run take."""

    def __init__(self) -> None:
        self._tests: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a test that has ended, here or in a worker."""
        taken = dict(report.user_properties).get(_PROPERTY)
        if taken is not None:
            self._tests[report.nodeid] = float(str(taken))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the summary."""
        folders: dict[str, float] = defaultdict(float)
        for test, seconds in self._tests.items():
            folders["/".join(test.partition("::")[0].split("/")[:2])] += seconds
        terminalreporter.section("processor time, processes included")
        rows = [("all, with imports and collection", used_seconds()), *_dearest(folders)]
        for name, seconds in [*rows, *_dearest(self._tests)[:_NUM_DEAREST]]:
            terminalreporter.write_line(f"{seconds:8.1f} s {name}")


def _dearest(taken: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(taken.items(), key=lambda each: -each[1])


def pytest_configure(config: pytest.Config) -> None:
    """Adds up in the process that prints: workers report to it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Bill())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins to measure."""
    session.config.stash[_BEGAN] = used_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Puts the time since the test before into the last report of a test."""
    report = yield
    if call.when == "teardown":
        began, now = item.config.stash[_BEGAN], used_seconds()
        report.user_properties.append((_PROPERTY, now - began))
        item.config.stash[_BEGAN] = now
    return report
