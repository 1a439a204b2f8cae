"""The plugin that runs vLLM's own tests on kvpool: tests that would not notice kvpool fail the run."""

from pathlib import Path

import pytest

from engine.own.run import run

pytestmark = pytest.mark.complete  # each run of vLLM's own tests has these checks
IMPORT = "from vllm.v1.core.sched.scheduler import Scheduler\n"
TESTS = {
    "__init__.py": "",
    "conftest.py": IMPORT,
    "early.py": IMPORT,
    "v1/core/test_prefix_caching.py": "",
    "test_classes.py": """
from engine.own.pools import new_name
from tests.conftest import Scheduler

def test_class():
    assert Scheduler.__name__ == "PoolScheduler"
    new_name()  # as each scheduler does
""",
    "test_nothing.py": "def test_nothing():\n    pass\n",
}
"""Tests as those of vLLM: the conftest.py of a folder imports classes before the tests do."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TESTS.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def exit_code(folder: Path, files: list[str], *options: str) -> object:
    in_one_process, paths = ("-n", "0"), [f"tests/{file}" for file in files]
    try:
        run(folder, paths, "kvpool", folder / "outcomes.json", [*in_one_process, *options])
    except SystemExit as ended:
        return ended.code
    return 0


def test_what_a_conftest_imports_is_replaced_and_a_file_that_uses_nothing_of_kvpool_fails_the_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(folder, ["test_classes.py", "test_nothing.py"]) == 1
    shown = capfd.readouterr().out
    assert "2 passed" in shown
    assert "ERROR tests/test_nothing.py: no test uses" in shown
    assert "ERROR tests/test_classes.py" not in shown


def test_a_class_that_was_imported_before_it_was_replaced_fails_the_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(folder, ["test_classes.py"], "-p", "tests.early") == 4
    assert "tests.early.Scheduler" in capfd.readouterr().err
