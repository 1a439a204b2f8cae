"""Starts the stack once, and prints the failures and recovery times at the end."""

import time
from collections.abc import Iterator

import pytest

from support.compose import Failure, Inject, Stack

_FAILURES = pytest.StashKey[list[Failure]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FAILURES] = []


@pytest.fixture
def inject(request: pytest.FixtureRequest) -> Inject:
    """Notes a failure that a test is about to inject."""

    def begin(what: str) -> Failure:
        request.config.stash[_FAILURES].append(Failure(what))
        return request.config.stash[_FAILURES][-1]

    return begin


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The stack, up and healthy; its logs are shown if a test failed."""
    stack = Stack()
    stack.compose("down", "-v", "--remove-orphans")
    start = time.monotonic()
    try:
        stack.up()
        request.config.stash[_FAILURES].append(
            Failure("built and brought up", None, time.monotonic() - start, "healthy, played on")
        )
        yield stack
    finally:
        if request.session.testsfailed or not request.config.stash[_FAILURES]:
            print(stack.compose("logs", "--no-color", "--tail", "40"))  # noqa: T201 - pytest shows it
        stack.down()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[_FAILURES]
    if not rows:
        return
    terminalreporter.section("what was done to the stack")
    terminalreporter.write_line(f"{'what':<52}{'noticed s':>10}{'recovered s':>13}  cost")
    for row in rows:
        noticed, recovered = (
            "-" if seconds is None else f"{seconds:.1f}" for seconds in (row.noticed_seconds, row.recovered_seconds)
        )
        terminalreporter.write_line(f"{row.what:<52}{noticed:>10}{recovered:>13}  {row.cost}")
