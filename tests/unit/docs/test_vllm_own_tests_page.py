"""The page of vLLM's own tests names the files that run and the reasons listed; `make test-vllm-own` counts tests.

Those of its host memory do not run: their page is written by hand.
"""

import re

from engine.own.expected import OwnTests
from engine.own.fetch import locked_version
from engine.own.table import shown
from support.paths import DOCS

_PAGE = (DOCS / "reference" / "vllm-own-tests.md").read_text()
_ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in _PAGE.splitlines() if line.startswith("| `")]


def test_the_page_lists_the_files_that_run() -> None:
    files = [row[0] for row in _ROWS if len(row) == 5]
    assert files == list(map(shown, OwnTests.read(locked_version()).files))


def test_the_page_gives_the_reasons_that_are_listed() -> None:
    reasons = {row[2] for row in _ROWS if len(row) == 3}
    assert reasons == set(OwnTests.read(locked_version()).fails_on_kvpool.values())


def test_each_listed_reason_explains_as_many_tests_as_do_not_pass() -> None:
    explained = sum(int(row[1]) for row in _ROWS if len(row) == 3)
    assert explained == sum(int(row[2]) - int(row[3]) for row in _ROWS if len(row) == 5)


def test_each_file_has_tests_that_use_kvpool() -> None:
    assert all(0 < int(row[4]) <= int(row[3]) for row in _ROWS if len(row) == 5)


def test_the_page_names_the_version_that_is_fetched() -> None:
    assert f"vLLM {locked_version()}" in _PAGE


def test_the_page_of_host_memory_counts_each_test_once_and_names_the_version() -> None:
    page = (DOCS / "reference" / "host-memory-referee.md").read_text()
    applies, does_not = (sum(map(int, re.findall(r" \| (\d+) \| ", part))) for part in page.split("| do not apply |"))
    assert f"Of {applies + does_not} tests, {applies} expect" in page
    assert f"{does_not} do not apply" in page
    assert f"vLLM {locked_version()}" in page
