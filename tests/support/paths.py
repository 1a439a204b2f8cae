"""Folders of the repository."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
TESTS: Final = ROOT / "tests"
MODEL_CONFIGS: Final = TESTS / "unit" / "models" / "configs"
