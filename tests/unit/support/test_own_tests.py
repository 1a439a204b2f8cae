"""The list of vLLM's own tests, and the page that a run of them writes."""

from pathlib import Path

import pytest

from engine.own.expected import OwnTests
from engine.own.table import Outcomes, page

VERSIONS = ("0.32.0", "0.33.0")
DOCUMENT = """
in_change = ["tests/a.py"]

[[files]]
files = ["tests/a.py", "tests/b.py"]

[[files]]
version = "0.33"
files = ["tests/d.py"]

[[fails_alone]]
reason = "needs a GPU"
tests = ["tests/a.py::test_gpu"]

[[fails_on_kvpool]]
reason = "private"
tests = ["tests/a.py::test_links", "tests/b.py::test_size[2]"]

[[fails_on_kvpool]]
version = "0.33"
reason = "later"
tests = ["tests/d.py::test_new"]

[[fails_on_kvpool]]
version = "0.32"
reason = "earlier"
tests = ["tests/b.py::test_old"]
"""


def read(folder: Path, document: str = DOCUMENT, version: str = VERSIONS[0]) -> OwnTests:
    path = folder / "own_tests.toml"
    path.write_text(document)
    return OwnTests.read(version, path)


def test_what_is_said_of_one_version_concerns_no_other(tmp_path: Path) -> None:
    older, newer = (read(tmp_path, version=version) for version in VERSIONS)
    assert (older.files[-1], newer.files[-1]) == ("tests/b.py", "tests/d.py")
    assert older.reason("tests/b.py::test_old", on_kvpool=True) == "earlier"
    assert not newer.reason("tests/b.py::test_old", on_kvpool=True)
    assert newer.reason("tests/d.py::test_new", on_kvpool=True) == "later"
    assert {*older.fails_on_kvpool} & {*newer.fails_on_kvpool} == {"tests/a.py::test_links", "tests/b.py::test_size[2]"}


def test_a_name_without_parameters_stands_for_all_of_them(tmp_path: Path) -> None:
    own_tests = read(tmp_path)
    assert own_tests.reason("tests/a.py::test_links[1]", on_kvpool=True) == "private"
    assert own_tests.reason("tests/b.py::test_size[2]", on_kvpool=True) == "private"
    assert not own_tests.reason("tests/b.py::test_size[3]", on_kvpool=True)


def test_what_fails_with_vllm_alone_fails_on_kvpool_too(tmp_path: Path) -> None:
    own_tests = read(tmp_path)
    assert own_tests.reason("tests/a.py::test_gpu", on_kvpool=False) == "needs a GPU"
    assert own_tests.reason("tests/a.py::test_gpu", on_kvpool=True) == "needs a GPU"
    assert not own_tests.reason("tests/a.py::test_links", on_kvpool=False)


def test_a_listed_test_that_its_file_does_not_have_is_unknown(tmp_path: Path) -> None:
    collected = ["tests/a.py::test_gpu", "tests/a.py::test_other[1]"]
    assert read(tmp_path).unknown(collected) == ["tests/a.py::test_links"]  # of b.py, nothing was collected


@pytest.mark.parametrize("test", ["tests/a.py::test_gpu", "tests/a.py::test_links", "tests/c.py::test_x"])
def test_a_test_that_is_listed_twice_or_in_no_file_is_refused(tmp_path: Path, test: str) -> None:
    again = f'[[fails_on_kvpool]]\nreason = "other"\ntests = ["{test}"]\n'
    with pytest.raises(ValueError, match=test.partition("::")[2]):
        read(tmp_path, DOCUMENT + again)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_list_is_valid(version: str) -> None:
    own_tests = OwnTests.read(version)
    assert set(own_tests.in_change) < set(own_tests.files)


def test_the_page_counts_what_passes_and_why_the_rest_does_not(tmp_path: Path) -> None:
    alone = {
        "tests/a.py::test_gpu": "xfailed",
        "tests/a.py::test_links": "passed",
        "tests/b.py::test_size[2]": "passed",
        "tests/b.py::test_size[3]": "passed",
    }
    on_kvpool = {**alone, "tests/a.py::test_links": "xfailed"}
    users = ["tests/a.py::test_links", "tests/b.py::test_size[3]"]
    rows = page(read(tmp_path), "0.32.0", Outcomes(alone, ()), Outcomes(on_kvpool, users)).splitlines()
    assert "| `a` | 2 | 1 | 0 | 0 |" in rows
    assert "| `b` | 2 | 2 | 2 | 1 |" in rows
    assert "| all | 4 | 3 | 2 | 1 |" in rows
    assert "| `a` | 1 | private |" in rows
