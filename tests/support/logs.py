"""The tables of log events in docs/reference/logs.md."""

from dataclasses import dataclass

from support.paths import DOCS

_PAGE = DOCS / "reference/logs.md"


@dataclass(frozen=True, slots=True)
class Event:
    """A row of a table; `levels` are in lower case."""

    message: str
    logger: str
    levels: frozenset[str]
    fields: frozenset[str]


def documented_events() -> dict[tuple[str, str], Event]:
    """All rows by logger and message."""
    events = {}
    for line in _PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 4 or not cells[0].startswith("`"):
            continue
        event = Event(cells[0].strip("`"), cells[1], _words(cells[2]), _words(cells[3]))
        assert (event.logger, event.message) not in events, f"{event.message} is listed twice"
        events[event.logger, event.message] = event
    assert events
    return events


def documented_fields() -> set[str]:
    """Field names in the table of fields."""
    table = _PAGE.read_text().split("## Fields")[1].split("##")[0]
    return {
        name.strip("` ")
        for line in table.splitlines()
        if line.startswith("| `")
        for name in line.split("|")[1].split(",")
    }


def _words(cell: str) -> frozenset[str]:
    return frozenset(word.strip() for word in cell.split(",") if word.strip())
