"""Reads JSON files that an operator names."""

import json
from pathlib import Path
from typing import Final

MAX_FILE_CHARACTERS: Final = 2**24
"""Most characters of a file, which bounds the memory to read it."""


def read_json(path: Path) -> object:
    """Reads a JSON file; a byte-order mark is skipped.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is too long or no JSON, or an object has a key twice.
    """
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(MAX_FILE_CHARACTERS + 1)
    if len(text) > MAX_FILE_CHARACTERS:
        raise ValueError(f"longer than {MAX_FILE_CHARACTERS:,} characters")
    if not text.strip():
        raise ValueError("empty file")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries: dict[str, object] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name[:100]!r} occurs twice in an object")
        entries[name] = value
    return entries
