"""Reads request traces whole, so that a broken one is refused before any request is played.

A trace has an entry per line: JSON objects, or a log of vLLM. See `trace_formats`.
"""

import gzip
import zlib
from pathlib import Path
from typing import Final

from kvpool.replay.trace_formats import FORMATS, MAX_LINE_CHARACTERS, EntryReader, TraceError, TraceRequest

_SHOWN_CHARACTERS: Final = 80


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Reads a trace.

    Args:
        path: The file, gzip-compressed if its name ends in .gz. A byte-order mark is skipped.
        limit: Maximum number of requests to read; None for all.

    Raises:
        TraceError: The file cannot be read, or an entry is not a request; the message names the line and its key.
    """
    requests: list[TraceRequest] = []
    number, first, reader = 0, "", EntryReader()
    open_text = gzip.open if path.suffix == ".gz" else open
    try:
        with open_text(path, "rt", encoding="utf-8-sig") as file:
            while line := file.readline(MAX_LINE_CHARACTERS + 1):
                number += 1
                first = first or line[:_SHOWN_CHARACTERS].strip()
                for request in reader.requests(line):
                    requests.append(request)
                    if len(requests) == limit:
                        return requests
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} line {number + 1}: truncated or damaged gzip file ({error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} line {number + 1}: not UTF-8") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except TraceError as error:
        raise TraceError(f"{path} line {number}: {error}") from error
    if not requests:
        begins = f"begins with {first!r}" if first else "is empty"
        raise TraceError(f"{path} line 1: no requests; the file {begins}; {FORMATS}")
    return requests
