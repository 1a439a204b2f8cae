"""The fields of log events, and how they read in a line of text.

Code logs fixed phrases and passes variable values in `extra`. docs/tables.py lists both.
"""

import json
import logging
from typing import Final

FIELDS: Final = (
    *("shard", "term", "member", "primary", "state_lost", "resumes", "pools"),
    *("pool", "session", "client", "rank", "epoch", "memory", "weights_version", "reason"),
    *("error", "method"),
    *("requests", "sessions", "ranks", "absent_ranks", "blocks", "cached_blocks", "planned_blocks", "buffers"),
    *("messages", "records", "bytes", "seconds"),
    *("calls", "tokens", "token_name", "peer", "path"),
    *("device", "host", "pid", "server", "address", "addresses", "steps"),
    *("journal", "setting", "field", "async_scheduling"),
    *("rounds", "waits_admission", "waits_decode", "waits_background", "copies_beside"),
)
"""All fields of kvpool's log events, in the order of output."""

_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_ORDER: Final = {name: place for place, name in enumerate(FIELDS)}
_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def format_bytes(size_bytes: int) -> str:
    """Formats a size in the largest unit that it reaches: "139.8 GiB", "8.0 MiB", "512 bytes"."""
    for name, unit_bytes in _UNITS:
        if abs(size_bytes) >= unit_bytes:
            return f"{size_bytes / unit_bytes:,.1f} {name}"
    return f"{size_bytes} bytes"


def fields_of(record: logging.LogRecord) -> list[tuple[str, object]]:
    """Returns the extra fields of a record, those of `FIELDS` first."""
    extras = [(name, value) for name, value in vars(record).items() if name not in _OWN]
    return sorted(extras, key=lambda field: (_ORDER.get(field[0], len(_ORDER)), field[0]))


def format_fields(fields: list[tuple[str, object]]) -> str:
    """Formats fields as " key=value key=value", with human-readable sizes; empty if there are none."""
    return "".join(f" {name}={_for_people(name, value)}" for name, value in fields)


def _for_people(name: str, value: object) -> str:
    if name == "bytes" and isinstance(value, int):
        text = format_bytes(value)
    elif isinstance(value, list | tuple):
        text = ",".join(map(str, value))
    else:
        text = str(value)
    if text and text.isprintable() and not set(text) & set(' "='):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())  # one line per record, even if a name has newlines
