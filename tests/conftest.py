"""Options of the whole suite."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["support.process_logs"]
os.environ.setdefault("KVPOOL_SERVE_PAST_EPOCH", "0")  # small numbers to compare with; without it they follow the time
# A slow machine fails no test: no deadline per example, no health check on speed.
settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow])
for name, max_examples in (("quick", 20), ("smoke", 10)):  # of 100; a test that asks for a multiple follows
    settings.register_profile(name, settings.get_profile("thorough"), max_examples=max_examples)
settings.load_profile("thorough")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        dest="golden_dir",
        default=str(Path(__file__).parent / "golden"),
        help="folder of golden files, searched with its subfolders (default: tests/golden)",
    )
    parser.addoption(
        "--complete",
        action="store_true",
        help="also run tests marked as complete: each golden file through each client, whole transcripts, more traces",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that only a complete run needs."""
    if config.getoption("complete"):
        return
    left_out = [item for item in items if item.get_closest_marker("complete")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("complete")]
