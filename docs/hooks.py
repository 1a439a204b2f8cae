"""Hooks of the site: the version of kvpool that it describes, and the tables that the code states."""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

from kvpool.client import __version__

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]

from docs.tables import filled  # noqa: E402 - found through the path above


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Names the version at the end of each page."""
    config.copyright = f"kvpool {__version__}"
    return config


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fills in the tables of a page."""
    return filled(markdown)
