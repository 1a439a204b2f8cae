"""Words and figures for people: short, of known width, and free of what could upset a terminal."""

from typing import Final

from rich.cells import cell_len, set_cell_size

_UNITS: Final = ("", "k", "M", "G", "T")


def clean(text: str, *, ascii_only: bool = False) -> str:
    """Replaces what does not print, escape sequences above all, in a name that somebody else chose."""
    if ascii_only:
        text = text.encode("ascii", "replace").decode("ascii")
    return "".join(char if char.isprintable() else "?" for char in text)


def fit(text: str, width: int, *, ascii_only: bool = False) -> str:
    """Fills a text up with blanks to so many cells of a terminal, or cuts it to them and marks the cut."""
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, width - 1) + ("~" if ascii_only else "…")


def short(value: float) -> str:
    """Writes a number in at most five characters: 0, 0.3, 42, 1.2k, 350k, 12.0M."""
    if value < 9.95 and value != int(value):  # noqa: PLR2004 - below it a digit after the point tells something
        return f"{value:.1f}"
    unit = 0
    while value >= 999.5 and unit < len(_UNITS) - 1:  # noqa: PLR2004 - which rounds to four digits
        value /= 1000
        unit += 1
    digits = 1 if unit and value < 99.95 else 0  # noqa: PLR2004 - which rounds to three digits
    return f"{value:.{digits}f}{_UNITS[unit]}"


def counted(number: int, what: str) -> str:
    """Writes how many there are of something."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def percent(share: float | None) -> str:
    """Writes a share in at most five characters; a dash if there is none."""
    if share is None:
        return "-"
    return "100%" if share >= 0.9995 else f"{share:.1%}"  # noqa: PLR2004 - which rounds to it


def duration(seconds: float) -> str:
    """Writes a time in at most six characters: 0.4s, 12s, 3m04s, 2h03m, 5d04h, 400d."""
    if seconds < 9.95:  # noqa: PLR2004 - below it tenths tell something
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
