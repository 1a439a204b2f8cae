"""Text and figures for people: short, of known width, and safe for a terminal."""

from typing import Final

import click
from rich.cells import cell_len, set_cell_size

_UNITS: Final = ("", "k", "M", "G", "T")


def clean(text: str, *, ascii_only: bool = False) -> str:
    """Replaces characters that do not print: escape sequences, ends of lines, controls of direction, lone surrogates.

    Others choose names, errors and files. So `print_line`, tables, `top`, errors and log lines pass through this.
    """
    if ascii_only:
        text = text.encode("ascii", "replace").decode("ascii")
    return "".join(char if char.isprintable() else "?" for char in text)


def print_line(text: str = "", *, err: bool = False) -> None:
    """Prints one line, whatever the text contains. Commands print through this or `kvpool.cli.tables` alone."""
    click.echo(clean(text), err=err)


def fit(text: str, width: int, *, ascii_only: bool = False) -> str:
    """Pads a text with blanks to `width` terminal cells, or cuts it and marks the cut."""
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, width - 1) + ("~" if ascii_only else "…")


def short(value: float) -> str:
    """Formats a number in at most five characters: 0, 0.3, 42, 1.2k, 350k, 12.0M."""
    if value < 9.95 and value != int(value):  # noqa: PLR2004 - smaller numbers get a decimal
        return f"{value:.1f}"
    unit = 0
    while value >= 999.5 and unit < len(_UNITS) - 1:  # noqa: PLR2004 - rounds to four digits
        value /= 1000
        unit += 1
    digits = 1 if unit and value < 99.95 else 0  # noqa: PLR2004 - rounds to three digits
    return f"{value:.{digits}f}{_UNITS[unit]}"


def counted(number: int, noun: str) -> str:
    """Formats a number and its noun: "1 session", "2 sessions"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(share: float | None) -> str:
    """Formats a ratio in at most five characters; a dash for None."""
    if share is None:
        return "-"
    return "100%" if share >= 0.9995 else f"{share:.1%}"  # noqa: PLR2004 - rounds to 100%


def duration(seconds: float) -> str:
    """Formats a time in at most six characters: 0.4s, 12s, 3m04s, 2h03m, 5d04h, 400d."""
    if seconds < 9.95:  # noqa: PLR2004 - shorter times get a decimal
        return f"{seconds:.1f}s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    days, rest_hours = divmod(hours, 24)
    if days > 99:  # noqa: PLR2004 - two digits
        return f"{days}d"
    if days:
        return f"{days}d{rest_hours:02}h"
    if hours:
        return f"{hours}h{rest_minutes:02}m"
    return f"{minutes}m{rest_seconds:02}s" if minutes else f"{rest_seconds}s"
