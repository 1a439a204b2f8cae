"""The golden files, and which of them a run replays through which client.

The core replays all in every run. The clients take turns: a quick run replays one file through each, a slow run each
file through one. A complete run replays each file through each client.
"""

from pathlib import Path

import pytest

from conformance.golden import read_schedules

QUICK = [
    "vllm-0.14.1/encdec",
    "vllm-0.14.1/full_keys",
    "vllm-0.32.0/sliding_eagle",
]
"""Cross attention; full attention with LoRA, salt and image keys; windows with EAGLE. Both reuse orders."""

CLIENTS = [
    "test_embedded",
    "test_stream",
    "test_unary",
    "test_asyncio",
    "test_the_core_answers_as_the_reference_across_restarts",
    "test_a_pair_answers_as_the_reference",
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule" not in metafunc.fixturenames:
        return
    schedules = read_schedules(golden_dir(metafunc.config))
    test = metafunc.function.__name__

    def marks(index: int, name: str) -> list[pytest.MarkDecorator]:
        if test not in CLIENTS:
            return []
        turn = CLIENTS.index(test)
        if name == QUICK[turn % len(QUICK)]:
            return []
        return [pytest.mark.slow] if index % len(CLIENTS) == turn else [pytest.mark.slow, pytest.mark.complete]

    metafunc.parametrize(
        "schedule", [pytest.param(s, id=s.name, marks=marks(i, s.name)) for i, s in enumerate(schedules)]
    )


def golden_dir(config: pytest.Config) -> Path:
    return Path(config.getoption("golden_dir"))


@pytest.fixture
def golden_folder(pytestconfig: pytest.Config) -> Path:
    return golden_dir(pytestconfig)
