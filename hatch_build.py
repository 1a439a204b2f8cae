"""Adds project URLs to the metadata of the wheel, if KVPOOL_REPOSITORY_URL names the repository.

The URL is a setting of the build, because a fork or a mirror has another one.
"""

import os

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RepositoryUrls(MetadataHookInterface):
    """The hook of hatchling."""

    def update(self, metadata: dict[str, object]) -> None:
        """Sets the URLs."""
        if url := os.environ.get("KVPOOL_REPOSITORY_URL", "").rstrip("/"):
            metadata["urls"] = {
                "Source": url,
                "Changelog": f"{url}/blob/HEAD/CHANGELOG.md",
                "Documentation": f"{url}/tree/HEAD/docs",
                "Issues": f"{url}/issues",
            }
