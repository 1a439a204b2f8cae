"""The gate of `make check` on lines of code and words of documentation."""

from pathlib import Path

import pytest

from budgets.budgets import budgets, figures, lowered, problems

CODE = '''\
"""What
the module is."""

# A comment.
LIMIT = """1
2"""
"""What the limit is."""


class Thing:
    """What a thing is."""

    def do(self) -> None:
        """What it does."""
        if LIMIT:
            print("done")  # with a comment
'''
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n- One line.\n\n## [0.1.0] - 2026-01-01\n\n- What was before.\n"
TABLE = "| what | at most |\n|---|---|\n| `kvpool.core` | 6 lines |\n| `docs/how-to` | 1,000 words |\n\nNext.\n"


def write(root: Path, path: str, text: str) -> None:
    """Writes a file, and the folders above it."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small repository."""
    for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        write(tmp_path, page, "")
    write(tmp_path, "CHANGELOG.md", CHANGELOG)
    write(tmp_path, "server/kvpool/core/blocks/thing.py", CODE)
    write(tmp_path, "proto/kvpool/v1/pool_pb2.py", CODE)
    write(tmp_path, "tests/unit/test_thing.py", "assert True\n")
    write(tmp_path, "docs/how-to/page.md", "word " * 1000)
    return tmp_path


def test_counts_code_without_comments_docstrings_and_generated_files(tree: Path) -> None:
    found = {part: figure for part, figure in figures(tree).items() if figure}
    assert found == {
        ("kvpool.core", "lines"): 6,
        ("tests", "lines"): 1,
        ("CHANGELOG.md", "words"): 3,
        ("docs/how-to", "words"): 1000,
    }


def test_an_added_line_fails_with_package_figure_and_budget(tree: Path) -> None:
    before = figures(tree)
    write(tree, "server/kvpool/core/added.py", "ADDED = 1\n")
    (text,) = problems(figures(tree), before)
    assert text.startswith("kvpool.core: 7 lines, the budget is 6: ")
    assert "CONTRIBUTING.md" in text


def test_a_package_without_a_budget_fails(tree: Path) -> None:
    before = figures(tree)
    write(tree, "server/kvpool/more/added.py", "ADDED = 1\n")
    (text,) = problems(figures(tree), before)
    assert text.startswith("kvpool.more: 1 lines, the budget is 0: ")


@pytest.mark.parametrize(("most", "fits"), [(999, False), (1000, True), (1040, True), (1041, False), (3000, False)])
def test_a_budget_fits_from_its_figure_to_two_percent_and_twenty_above(most: int, *, fits: bool) -> None:
    assert (problems({("tests", "lines"): 1000}, {("tests", "lines"): most}) == []) is fits


def test_budgets_are_lowered_and_never_raised() -> None:
    found = {("kvpool.core", "lines"): 7, ("docs/how-to", "words"): 900}
    table = lowered(TABLE, found)
    assert budgets(table) == {("kvpool.core", "lines"): 6, ("docs/how-to", "words"): 900}
    assert table == TABLE.replace("1,000", "900")


def test_the_row_of_a_removed_package_goes() -> None:
    assert lowered(TABLE, {("docs/how-to", "words"): 1000}) == TABLE.replace("| `kvpool.core` | 6 lines |\n", "")
