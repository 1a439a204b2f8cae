"""Tables for people, and answers as JSON for scripts."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final, Generic, TypeVar

import click
from google.protobuf.message import Message
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpool.cli.text import clean, fit, print_line
from kvpool.wire.readable import message_json

_RowT = TypeVar("_RowT")

_GAP: Final = 1
_UNLIMITED: Final = 10_000
"""A width in cells that no row exceeds: the longest names have 256."""


@dataclass(frozen=True, slots=True)
class Column(Generic[_RowT]):
    """A column of a table.

    Attributes:
        title: Its heading.
        cell: Returns the cell of a row.
        is_text: Whether it holds left-aligned names, which are cut if the table is too wide.
    """

    title: str
    cell: Callable[[_RowT], str]
    is_text: bool = False


def print_table(columns: Sequence[Column[_RowT]], rows: Iterable[_RowT]) -> None:
    """Prints a table no wider than the terminal; in a pipe or a file no cell is cut."""
    console = Console()
    table = make_table(columns, rows, console.width if console.is_terminal else None, ascii_only=is_ascii(console))
    if not console.is_terminal:
        console.width = _UNLIMITED
    console.print(table, highlight=False)


def make_table(
    columns: Sequence[Column[_RowT]], rows: Iterable[_RowT], width: int | None, *, ascii_only: bool = False
) -> Table:
    """Makes a table. Names are cut if it would be wider than `width` cells; None for no limit."""
    lines = [[column.title for column in columns]]
    lines += [[clean(column.cell(row), ascii_only=ascii_only) for column in columns] for row in rows]
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    texts = [i for i, column in enumerate(columns) if column.is_text]
    if width is not None:
        figures = sum(widths) - sum(widths[i] for i in texts) + _GAP * (len(columns) - 1)
        _shrink(widths, texts, max(width - figures, 3 * len(texts)))
    for line in lines:
        for i in texts:
            line[i] = fit(line[i], widths[i], ascii_only=ascii_only)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for column, title in zip(columns, lines[0], strict=True):
        table.add_column(Text(title), justify="left" if column.is_text else "right", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    return table


def print_facts(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Prints a table of names and values."""
    table = Table(title=Text(clean(title)), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    Console().print(table, highlight=False)


def is_ascii(console: Console) -> bool:
    """Returns whether a console can show ASCII only."""
    return not console.encoding.lower().startswith("utf")


def print_json(answer: dict[str, Any]) -> None:
    """Prints one JSON object on one line. Messages and dataclasses become objects, and enums their values."""
    click.echo(json.dumps(answer, default=_plain))


def print_answer(answer: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    """Prints the JSON object or the sentence."""
    if as_json:
        print_json(answer)
    else:
        print_line(sentence)


def _plain(value: Any) -> object:  # noqa: ANN401 - as json has it
    if isinstance(value, Message):
        return message_json(value)
    return value.value if isinstance(value, Enum) else asdict(value)


def _shrink(widths: list[int], texts: Sequence[int], available: int) -> None:
    """Narrows the widest text columns until all of them fit into `available` cells."""
    while sum(widths[i] for i in texts) > available:
        widest = max(texts, key=lambda i: widths[i])
        widths[widest] -= 1
