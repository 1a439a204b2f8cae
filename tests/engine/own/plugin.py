"""Runs vLLM's own unit tests on kvpool: a plugin of pytest, in the place of the conftest.py of vLLM's tests.

With `--on kvpool`, tests import kvpool's schedulers, manager and planner in vLLM's place. With `--on vllm`
they import vLLM's, which shows what passes here at all. A test that is expected to fail (own_tests.toml)
and passes fails the run.
"""

import json
import logging
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from engine.own import pools, replacements
from engine.own.expected import OwnTests
from engine.service import service
from kvpool.client.vllm.versions import VERSION

_IMPORTED_LATER: Final = ("tests.v1.core.test_prefix_caching",)
"""Tests that other tests import while they run."""
_USES: Final = "uses of kvpool"
_CLASSES: Final = pytest.StashKey[pytest.MonkeyPatch]()


class _Outcomes:
    """Writes the outcome of each test to a file. On kvpool, a file whose tests use nothing of kvpool fails the run.

    Such a file proves nothing of kvpool: its tests have classes of vLLM, or none.
    """

    def __init__(self, path: Path | None, *, on_kvpool: bool) -> None:
        self._path = path
        self._on_kvpool = on_kvpool
        self._outcomes: dict[str, str] = {}
        self._users: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._outcomes[report.nodeid] = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        if any(name == _USES for name, _ in report.user_properties):
            self._users.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._path:
            document = {"outcomes": self._outcomes, "users": sorted(self._users)}
            self._path.write_text(json.dumps(document, indent=1))
        if self._files_without_users():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for file in self._files_without_users():
            terminalreporter.write_line(f"ERROR {file}: no test uses a scheduler, a manager or the planner of kvpool")

    def _files_without_users(self) -> list[str]:
        files, of_users = ({name.partition("::")[0] for name in names} for names in (self._outcomes, self._users))
        return sorted(files - of_users) if self._on_kvpool else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on", choices=("vllm", "kvpool"), default="kvpool", help="whose scheduler, manager and planner")
    parser.addoption("--outcomes", type=Path, help="a JSON file to write the outcome of each test to")
    parser.addoption("--optional", action="store_true", help="vLLM's own option: also tests that it leaves out")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Replaces vLLM's classes before a conftest.py of vLLM's tests imports them."""
    replacements.make_up_images()
    early_config.stash[_CLASSES] = pytest.MonkeyPatch()
    if early_config.known_args_namespace.on == "kvpool":
        replacements.replace_classes(early_config.stash[_CLASSES])


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that hears of all tests
        outcomes = _Outcomes(config.getoption("--outcomes"), on_kvpool=_is_on_kvpool(config))
        config.pluginmanager.register(outcomes)


@pytest.hookimpl(tryfirst=True)  # before tests are selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is expected to fail. An expectation that fits no test is an error."""
    own_tests = OwnTests.read(VERSION)
    if unknown := own_tests.unknown(item.nodeid for item in items):
        raise pytest.UsageError(f"own_tests.toml lists tests that do not exist: {', '.join(unknown)}")
    for item in items:
        if "optional" in item.keywords and not config.getoption("--optional"):
            item.add_marker(pytest.mark.skip(reason="vLLM leaves it out"))
        if reason := own_tests.reason(item.nodeid, on_kvpool=_is_on_kvpool(config)):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Puts vLLM's classes back, now that all tests are imported: kvpool compares itself with vLLM's manager."""
    for name in _IMPORTED_LATER:  # here, whichever files run
        import_module(name)
    if _is_on_kvpool(session.config) and (missed := replacements.missed()):
        raise pytest.UsageError(f"these are vLLM's, and not kvpool's: {', '.join(missed)}")
    session.config.stash[_CLASSES].undo()


@pytest.fixture(scope="session", autouse=True)
def _server(pytestconfig: pytest.Config) -> Iterator[None]:
    """A server for all tests of this process."""
    if not _is_on_kvpool(pytestconfig):
        yield
        return
    options = ("--max-pools", "4096", "--max-token-pools", "4096")
    with TemporaryDirectory() as folder, service(Path(folder), *options) as started, pools.served_at(started.address):
        yield


@pytest.fixture(autouse=True)
def _pools(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Ends the sessions of a test, and removes its pools. The report of the teardown has what of kvpool it used."""
    pools.take_uses()
    yield
    pools.close_all()
    if uses := pools.take_uses():
        record_property(_USES, uses)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets processes that tests start take ten times as long as on vLLM's machines."""
    run = subprocess.run

    def run_longer(*args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        return run(*args, timeout=timeout and 10 * timeout, **kwargs)

    monkeypatch.setattr(subprocess, "run", run_longer)


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """A fixture of vLLM's conftest.py: the log of vLLM, which does not propagate."""
    log = logging.getLogger("vllm")
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "level", logging.INFO)
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """A fixture of vLLM's conftest.py: whether to free the memory of a GPU."""
    return False


def _is_on_kvpool(config: pytest.Config) -> bool:
    return bool(config.getoption("--on") == "kvpool")
