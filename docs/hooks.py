"""Hooks of the site: the version of kvpool that it describes."""

from mkdocs.config.defaults import MkDocsConfig

from kvpool.client import __version__


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Names the version at the end of each page."""
    config.copyright = f"kvpool {__version__}"
    return config
