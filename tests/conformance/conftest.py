"""Location and selection of the golden files."""

from pathlib import Path

import pytest

from conformance.golden import read_schedules


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule" not in metafunc.fixturenames:
        return
    schedules = read_schedules(golden_dir(metafunc.config))
    metafunc.parametrize("schedule", [pytest.param(s, id=s.name) for s in schedules])


def golden_dir(config: pytest.Config) -> Path:
    return Path(config.getoption("golden_dir"))


@pytest.fixture
def golden_folder(pytestconfig: pytest.Config) -> Path:
    return golden_dir(pytestconfig)
