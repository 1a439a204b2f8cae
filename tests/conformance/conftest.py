"""The golden files, and which of them a run replays through which transport.

The core replays all. Every other way in replays a file per mechanism in a quick run. A slow run adds the other files:
each through the embedded client, the journal and a pair of servers, and through one of the clients over gRPC in turn.
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

OVER_GRPC = ["test_stream", "test_unary", "test_asyncio"]
"""Tests that take turns with the files, see --complete."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule" not in metafunc.fixturenames:
        return
    schedules = read_schedules(golden_dir(metafunc.config))
    is_quick = metafunc.module.__name__.endswith("test_core")
    test = metafunc.function.__name__

    def marks(index: int, name: str) -> list[pytest.MarkDecorator]:
        if is_quick or name in QUICK:
            return []
        is_turn = test not in OVER_GRPC or OVER_GRPC[index % len(OVER_GRPC)] == test
        return [pytest.mark.slow] if is_turn else [pytest.mark.slow, pytest.mark.complete]

    metafunc.parametrize(
        "schedule", [pytest.param(s, id=s.name, marks=marks(i, s.name)) for i, s in enumerate(schedules)]
    )


def golden_dir(config: pytest.Config) -> Path:
    return Path(config.getoption("golden_dir"))


@pytest.fixture
def golden_folder(pytestconfig: pytest.Config) -> Path:
    return golden_dir(pytestconfig)
