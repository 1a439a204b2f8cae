"""Options of the whole suite."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        dest="golden_dir",
        default=str(Path(__file__).parent / "golden"),
        help="folder of golden files, searched with its subfolders (default: tests/golden)",
    )
