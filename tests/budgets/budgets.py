"""Compares lines of code and words of documentation with the table of CONTRIBUTING.md.

    python tests/budgets/budgets.py           # fails if a figure is above its budget, or far below
    python tests/budgets/budgets.py --write   # lowers the budgets to the figures

A budget is raised, or added for a new package, by an edit of the table, and the commit says why. Blank lines, comments,
docstrings and generated files are no lines of code.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = "CONTRIBUTING.md"
_ROW: Final = re.compile(r"^\| `(?P<name>\S+)` \| (?P<most>[\d,]+) (?P<unit>lines|words) \|\n", re.MULTILINE)
_CODE: Final = ("proto", "server", "client", "gpu_worker", "benchmarks", "deploy", "docs", "examples", "tests")
_PAGES: Final = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")

Part = tuple[str, str]
"""What a budget is of: the name of a package, folder or page, and the unit of its figure."""


def figures(root: Path) -> dict[Part, int]:
    """Lines of code per package or folder, and words per page or folder of the documentation."""
    lines, words = Counter[Part](), Counter[Part]()
    for path in (path for folder in _CODE for path in (root / folder).rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if "_pb2" not in path.name:
            name = f"kvpool.{folders[2]}" if folders[1:2] == ("kvpool",) else folders[0]
            lines[name, "lines"] += _code_lines(path.read_text(encoding="utf-8"))
    for path in (*(root / name for name in _PAGES), *(root / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if path.name == "CHANGELOG.md":
            text = text.partition("\n## [Unreleased]\n")[2].partition("\n## [")[0]
        name = path.name if path.parent == root else path.parent.relative_to(root).as_posix()
        words[name, "words"] += len(text.split())
    return dict(sorted(lines.items()) + sorted(words.items()))


def budgets(table: str) -> dict[Part, int]:
    """The budgets in the text of a table."""
    return {(row["name"], row["unit"]): int(row["most"].replace(",", "")) for row in _ROW.finditer(table)}


def problems(found: dict[Part, int], allowed: dict[Part, int]) -> list[str]:
    """What to change in the table or in the tree; a budget may be 2 % and 20 above its figure."""
    texts = []
    for name, unit in sorted(found.keys() | allowed.keys()):
        figure, most = found.get((name, unit), 0), allowed.get((name, unit), 0)
        if figure > most:
            texts.append(
                f"{name}: {figure:,} {unit}, the budget is {most:,}: remove some, or raise the budget in {TABLE} "
                "and say why in the commit"
            )
        elif most > 1.02 * figure + 20:
            texts.append(f"{name}: {figure:,} {unit}, the budget is {most:,}: lower it with --write")
    return texts


def lowered(table: str, found: dict[Part, int]) -> str:
    """The table with no budget above its figure, and no row of what is gone."""

    def row(match: re.Match[str]) -> str:
        name, unit, most = match["name"], match["unit"], int(match["most"].replace(",", ""))
        figure = min(most, found.get((name, unit), 0))
        return f"| `{name}` | {figure:,} {unit} |\n" if figure else ""

    return _ROW.sub(row, table)


def _code_lines(source: str) -> int:
    lines = source.splitlines()
    for first, last in _docstrings(ast.parse(source).body):
        lines[first - 1 : last] = [""] * (last - first + 1)
    return sum(1 for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _docstrings(body: list[ast.stmt]) -> Iterator[tuple[int, int]]:
    """First and last line of each string that stands as a statement in a body or in those nested in it."""
    for statement in body:
        match statement:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                yield first, last
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If() | ast.With() | ast.Try():
                yield from _docstrings(statement.body)


def main() -> int:
    """Runs from the command line; exits with 1 if the table and the tree do not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"lower the budgets in {TABLE} to the figures")
    write = parser.parse_args().write
    path = ROOT / TABLE
    found, table = figures(ROOT), path.read_text(encoding="utf-8")
    if write:
        table = lowered(table, found)
        path.write_text(table, encoding="utf-8")
    texts = problems(found, budgets(table))
    wheel = sum(figure for (name, _), figure in found.items() if name.startswith("kvpool."))
    words = sum(figure for (_, unit), figure in found.items() if unit == "words")
    print(*texts, f"{wheel:,} lines of code in the wheel, {words:,} words of documentation", sep="\n")  # noqa: T201
    return 1 if texts else 0


if __name__ == "__main__":
    sys.exit(main())
