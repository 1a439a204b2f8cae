"""Options of the whole suite."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("KVPOOL_SERVE_PAST_EPOCH", "0")  # small numbers to compare with; without it they follow the time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        dest="golden_dir",
        default=str(Path(__file__).parent / "golden"),
        help="folder of golden files, searched with its subfolders (default: tests/golden)",
    )
