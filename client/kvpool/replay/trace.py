"""Reads request traces whole, so that a broken one is refused before any request is played.

A trace has an entry per line (JSON objects, or a log of vLLM), or is a JSON array of entries. See `trace_formats`.
"""

import gzip
import json
import zlib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TextIO

from kvpool.replay.trace_formats import EntryReader, TraceError, TraceRequest


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Reads a trace.

    Args:
        path: The file, gzip-compressed if its name ends in .gz.
        limit: Maximum number of requests to read; None for all.

    Raises:
        TraceError: The file cannot be read, or an entry is not a request; the message names the entry and its key.
    """
    requests: list[TraceRequest] = []
    kind, number, reader = "line", 0, EntryReader()
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            first = file.readline()
            entries: Iterable[object] = chain([first] if first else [], file)
            if first.lstrip().startswith("["):
                kind, entries = "entry", _array(first, file)
            for number, entry in enumerate(entries, 1):  # noqa: B007 - for the errors below
                requests += reader.requests(entry)
                if limit is not None and len(requests) >= limit:
                    return requests[:limit]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} {kind} {number + 1}: truncated or damaged gzip file ({error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} {kind} {number + 1}: not UTF-8") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except TraceError as error:
        raise TraceError(f"{path} {kind} {number}: {error}" if number else f"{path}: {error}") from error
    if not requests:
        raise TraceError(f"{path} {kind} 1: no requests")
    return requests


def _array(first: str, file: TextIO) -> list[object]:
    try:
        entries: list[object] = json.loads(first + file.read())
    except ValueError as error:
        raise TraceError(f"not JSON ({error})") from error
    return entries
