"""The golden files, and which of them a run replays through which client.

The core replays all in every run. A quick run replays one file through the embedded client, a link and the
journal; a slow run a file per mechanism through each client; a complete run each file.
"""

from pathlib import Path

import pytest

from conformance.golden import read_schedules

MECHANISMS = [
    "vllm-0.14.1/encdec",
    "vllm-0.14.1/full_keys",
    "vllm-0.32.0/sliding_eagle",
]
"""Cross attention; full attention with LoRA, salt and image keys; windows with EAGLE. Both reuse orders."""

CLIENTS = [
    "test_embedded",
    "test_link",
    "test_the_core_answers_as_the_reference_across_restarts",
]
SLOW_CLIENTS = ["test_unary", "test_schedule", "test_node", "test_asyncio"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule" not in metafunc.fixturenames:
        return
    schedules = read_schedules(golden_dir(metafunc.config))
    test = metafunc.function.__name__

    def marks(name: str) -> list[pytest.MarkDecorator]:
        if test not in [*CLIENTS, *SLOW_CLIENTS]:
            return []
        if name not in MECHANISMS:
            return [pytest.mark.complete]
        is_turn = test in CLIENTS and name == MECHANISMS[CLIENTS.index(test) % len(MECHANISMS)]
        return [] if is_turn else [pytest.mark.slow]

    metafunc.parametrize("schedule", [pytest.param(s, id=s.name, marks=marks(s.name)) for s in schedules])


def golden_dir(config: pytest.Config) -> Path:
    return Path(config.getoption("golden_dir"))


@pytest.fixture
def golden_folder(pytestconfig: pytest.Config) -> Path:
    return golden_dir(pytestconfig)
