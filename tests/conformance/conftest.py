"""The golden files, and which of them a quick run replays through which transport.

The core replays all. Every other way in replays a file per mechanism in a quick run and all in a slow one.
"""

from pathlib import Path

import pytest

from conformance.golden import read_schedules

QUICK = {
    "vllm-0.14.1/encdec",
    "vllm-0.14.1/full_keys",
    "vllm-0.32.0/sliding_eagle",
}
"""Full attention with LoRA, salt and image keys, windows with EAGLE, cross attention; both reuse orders."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule" not in metafunc.fixturenames:
        return
    schedules = read_schedules(golden_dir(metafunc.config))
    is_quick = metafunc.module.__name__.endswith("test_core")
    metafunc.parametrize(
        "schedule",
        [pytest.param(s, id=s.name, marks=() if is_quick or s.name in QUICK else pytest.mark.slow) for s in schedules],
    )


def golden_dir(config: pytest.Config) -> Path:
    return Path(config.getoption("golden_dir"))


@pytest.fixture
def golden_folder(pytestconfig: pytest.Config) -> Path:
    return golden_dir(pytestconfig)
