"""Options of the whole suite."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["support.process_logs", "support.processor_time"]

os.environ.setdefault("KVPOOL_SERVE_NO_JOURNAL", "1")  # nothing is written to the home of the user
os.environ.setdefault("KVPOOL_SERVE_PAST_EPOCH", "0")  # small numbers to compare with; without it they follow the time

DEPTHS = {"quick": ({"slow", "complete"}, 10), "change": ({"complete"}, 50), "all": (set[str](), 100)}
"""The marks that each depth leaves out, and its examples per property; a test that asks for a multiple follows."""
for name, (_, max_examples) in DEPTHS.items():
    # A slow machine fails no test: no deadline per example, no health check on speed.
    settings.register_profile(
        name, max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        dest="golden_dir",
        default=str(Path(__file__).parent / "golden"),
        help="folder of golden files, searched with its subfolders (default: tests/golden)",
    )
    parser.addoption(
        "--depth",
        choices=DEPTHS,
        default="change",
        help="quick: without slow tests; change: what a change must pass; all: also tests marked as complete",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile(config.getoption("--depth"))


def pytest_collection_finish() -> None:
    """Leaves what was imported and collected out of garbage collections, which take 0.2 s each with it."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what belongs to a greater depth."""
    left_out, _ = DEPTHS[config.getoption("--depth")]
    deselected = [item for item in items if not left_out.isdisjoint(mark.name for mark in item.iter_markers())]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if left_out.isdisjoint(mark.name for mark in item.iter_markers())]
