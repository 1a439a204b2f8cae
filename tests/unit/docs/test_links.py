"""Links within the repository lead to existing files and headings, and what pages name of the source exists."""

import re
from pathlib import Path

import pytest

from support.pages import PAGES
from support.paths import ROOT

SOURCE_PATH = re.compile(r"`((?:proto|server|client|gpu_worker|tests|benchmarks|examples|deploy|docs)/[\w./-]+)`")

FILE_NAME = re.compile(r"(?<![\w./-])(?:\w+/)*\w+\.(?:py|proto)\b")
TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
SOURCES = ("proto", "server", "client", "gpu_worker")
REPOSITORY = (*SOURCES, "benchmarks", "deploy", "docs", "examples", "tests")
SAVED_BY_READERS = {"share.py"}


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


@pytest.fixture(scope="module")
def files() -> set[str]:
    """Every path of a source file, and every end of such a path."""
    paths = [path.relative_to(ROOT) for top in REPOSITORY for path in (ROOT / top).rglob("*.*") if path.is_file()]
    return {"/".join(path.parts[first:]) for path in paths for first in range(len(path.parts))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path, files: set[str]) -> None:
    """Also names without their directory, such as those of the source tree."""
    if page.name == "CHANGELOG.md":
        pytest.skip("earlier entries name earlier files")
    assert not set(FILE_NAME.findall(page.read_text())) - files - SAVED_BY_READERS


def test_named_tests_exist() -> None:
    defined = {name for path in (ROOT / "tests").rglob("test_*.py") for name in TEST.findall(path.read_text())}
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named
    assert not named - defined


def test_map_of_the_code_lists_every_package_and_proto() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    packages = {f"{path.parent.name}/" for root in SOURCES for path in (ROOT / root).rglob("__init__.py")}
    protos = {path.name for path in (ROOT / "proto" / "kvpool" / "v1").glob("*.proto")}
    assert packages >= {"cluster/", "lending/"}
    assert not {name for name in packages | protos if name not in page}
