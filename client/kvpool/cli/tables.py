"""Tables for people, and answers as JSON for scripts."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpool.cli.text import clean, fit

_GAP: Final = 1
_UNLIMITED: Final = 10_000
"""A width in cells that no row exceeds: the longest names have 256."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        is_text: Whether it holds left-aligned names, which are cut if the table is too wide.
    """

    title: str
    is_text: bool = False


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table no wider than the terminal; in a pipe or a file no cell is cut."""
    console = Console()
    table = make_table(columns, rows, console.width if console.is_terminal else None, ascii_only=is_ascii(console))
    if not console.is_terminal:
        console.width = _UNLIMITED
    console.print(table, highlight=False)


def make_table(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int | None, *, ascii_only: bool = False
) -> Table:
    """Makes a table. Names are cut if it would be wider than `width` cells; None for no limit."""
    cells = [[clean(cell, ascii_only=ascii_only) for cell in row] for row in rows]
    widths = [max(map(cell_len, (column.title, *(row[i] for row in cells)))) for i, column in enumerate(columns)]
    texts = [i for i, column in enumerate(columns) if column.is_text]
    if width is not None:
        figures = sum(widths) - sum(widths[i] for i in texts) + _GAP * (len(columns) - 1)
        _shrink(widths, texts, max(width - figures, 3 * len(texts)))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(
            Text(fit(column.title, widths[i], ascii_only=ascii_only) if column.is_text else column.title),
            justify="left" if column.is_text else "right",
            no_wrap=True,
        )
    for row in cells:
        table.add_row(
            *(
                Text(fit(cell, widths[i], ascii_only=ascii_only) if columns[i].is_text else cell)
                for i, cell in enumerate(row)
            )
        )
    return table


def two_columns(title: str, rows: list[tuple[str, str]]) -> Table:
    """Makes a table of names and values."""
    table = Table(title=Text(title), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def is_ascii(console: Console) -> bool:
    """Returns whether a console can show ASCII only."""
    return not console.encoding.lower().startswith("utf")


def print_json(answer: dict[str, Any]) -> None:
    """Prints one JSON object on one line."""
    click.echo(json.dumps(answer))


def print_answer(answer: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    """Prints the JSON object or the sentence."""
    if as_json:
        print_json(answer)
    else:
        click.echo(sentence)


def _shrink(widths: list[int], texts: Sequence[int], room: int) -> None:
    """Narrows the widest text columns until all of them fit into `room` cells."""
    while sum(widths[i] for i in texts) > room:
        widest = max(texts, key=lambda i: widths[i])
        widths[widest] -= 1
