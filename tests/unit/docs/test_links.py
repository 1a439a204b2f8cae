"""Links within the repository lead to existing files and headings, and paths named in pages exist."""

import re
from pathlib import Path

import pytest

from support.pages import PAGES
from support.paths import ROOT

SOURCE_PATH = re.compile(r"`((?:proto|server|client|gpu_worker|tests|benchmarks|examples|deploy|docs)/[\w./-]+)`")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_paths_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("earlier entries name earlier paths")
    missing = [path for path in SOURCE_PATH.findall(page.read_text()) if not (ROOT / path).exists()]
    assert not missing
