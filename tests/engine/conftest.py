"""What stands before tests of vLLM: its import, where it is there, and the service that engines are attached to."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine.service import service
from support import processes

os.environ.update(processes.environment())  # where processes that tests start find these modules
pytest.register_assert_rewrite("engine.manager_pair", "engine.manager_program")  # what differs is shown

with warnings.catch_warnings(), suppress(ImportError):
    warnings.simplefilter("ignore")  # what vLLM and torch say of themselves as they are imported
    import_module("vllm.v1.core.sched.async_scheduler")

_ORDER = (
    "test_versions",
    "test_signatures",
    "test_tokens",
    "test_lending",
    "test_deaths",
    "test_serving",
    "test_data_parallel",
    "test_serving_lent",
    "test_plugin",
    "test_scheduler",
    "test_sharing",
)
"""First what shows within a minute that vLLM has changed. Then files that take long, the longest first, so that all
processes of a run end at about one time."""


class _NeedsVllm(pytest.Module):
    """A file of tests that is not imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("vLLM is not installed here")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if find_spec("vllm"):
        return None
    skipped: pytest.Module = _NeedsVllm.from_parent(parent, path=module_path)
    return skipped


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the files, see `_ORDER`; `make test-vllm` keeps their order."""
    items.sort(key=lambda item: _ORDER.index(item.path.stem) if item.path.stem in _ORDER else len(_ORDER))


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where a service listens that all tests of the session share."""
    with TemporaryDirectory() as folder, service(Path(folder), "--max-pools", "4096") as started:
        yield started.address


@pytest.fixture(autouse=True)
def sessions_end() -> Iterator[None]:
    """Ends the sessions of the schedulers that a test has made."""
    yield
    if driving := sys.modules.get("engine.driving"):
        driving.end_sessions()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Of the tests of a file."""
    with TemporaryDirectory() as path:  # shorter than tmp_path: the address of a socket is limited
        yield Path(path)


@pytest.fixture(scope="module")
def starts() -> Iterator[object]:
    """Starts `vllm serve` for the tests of a file."""
    from engine.vllm_serve import serving  # noqa: PLC0415 - needs what vLLM needs

    with serving() as started:
        yield started


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that records what vLLM plans for models."""
    parser.addoption("--record-plans", action="store_true", help="write tests/golden/model_plans.json.gz")
