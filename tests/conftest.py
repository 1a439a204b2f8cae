"""Options of the whole suite."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("KVPOOL_SERVE_PAST_EPOCH", "0")  # small numbers to compare with; without it they follow the time
settings.register_profile("quick", max_examples=30)  # of 100; the tests that take long follow it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        dest="golden_dir",
        default=str(Path(__file__).parent / "golden"),
        help="folder of golden files, searched with its subfolders (default: tests/golden)",
    )
