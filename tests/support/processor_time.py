"""Processor time of tests, their processes included: a summary at the end of each run, and a budget.

With `--processor-budget SECONDS` a run fails if a test that is not marked as slow takes more. A budget is for the
machine on which it was chosen: on one that takes n times as long for a fixed piece of work, it is n times as large.
"""

import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

from support.programs import descendants

_NUM_DEAREST: Final = 10
_PROPERTY: Final = "processor_seconds"
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_PIECE_OF_WORK: Final = range(400_000)
_PIECE_SECONDS: Final = 0.005
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


def _slowness() -> float:
    """How many times as long this machine takes; at least 1."""

    def work_seconds() -> float:
        began = time.process_time()
        for _ in _PIECE_OF_WORK:
            pass
        return time.process_time() - began

    return max(1.0, min(work_seconds() for _ in range(5)) / _PIECE_SECONDS)


class Bill:
    """Plugin that adds up what the tests of a run take.

    Args:
        budget_seconds: Most for a test that is not slow; 0 for no limit.
    """

    def __init__(self, budget_seconds: float) -> None:
        self._budget_seconds = budget_seconds
        self._slowness = _slowness()
        self._tests: dict[str, float] = {}
        self._slow: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a test that has ended, here or in a worker."""
        taken = dict(report.user_properties).get(_PROPERTY)
        if taken is not None:
            self._tests[report.nodeid] = float(str(taken))
            if "slow" in report.keywords:
                self._slow.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fails the run if a test is too dear."""
        if self._too_dear() and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the summary."""
        folders: dict[str, float] = defaultdict(float)
        for test, seconds in self._tests.items():
            folders["/".join(test.partition("::")[0].split("/")[:2])] += seconds
        terminalreporter.section("processor time, processes included")
        rows = [("all, with imports and collection", used_seconds()), *_dearest(folders)]
        for name, seconds in [*rows, *_dearest(self._tests)[:_NUM_DEAREST]]:
            terminalreporter.write_line(f"{seconds:8.1f} s {name}")
        for line in self._too_dear():
            terminalreporter.write_line(line, red=True)

    def _too_dear(self) -> list[str]:
        limit = self._budget_seconds * max(self._slowness, _slowness())
        return [
            f"{test} takes {seconds:.1f} s, more than {limit:.0f} s: make it cheaper, or mark it as slow"
            for test, seconds in self._tests.items()
            if seconds > limit > 0 and test not in self._slow
        ]


def _dearest(taken: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(taken.items(), key=lambda each: -each[1])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the budget."""
    parser.addoption(
        "--processor-budget",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="fail if a test that is not slow takes more processor time, its processes included",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Adds up in the process that prints: workers report to it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Bill(config.getoption("--processor-budget")))


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
