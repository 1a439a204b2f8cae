"""Reads request traces in the format of the Mooncake traces.

A line is a JSON object: `input_length` and `output_length` in tokens, and `hash_ids` with one id per 512 tokens of the
input (the last block is usually partial). Equal ids mean equal prefixes. `timestamp` (ms) is checked but not used.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from kvpool.core.ids import MAX_TOKENS

TRACE_BLOCK_TOKENS: Final = 512
_MAX_TOKEN_ID: Final = 2**32 - 1


class TraceError(ValueError):
    """A trace cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    Attributes:
        input_length: Tokens of the prompt.
        output_length: Tokens to generate.
        hash_ids: One id per 512 tokens of the prompt.
    """

    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def token_ids(self) -> list[int]:
        """Makes a prompt. A block with id h is the token h, 512 times, so that prefixes match with any block size."""
        tokens: list[int] = []
        for hash_id in self.hash_ids:
            tokens += [hash_id] * TRACE_BLOCK_TOKENS
        del tokens[self.input_length :]
        return tokens


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Reads a whole trace, so that a broken trace is refused before any request is played.

    Args:
        path: A file of JSON lines, gzip-compressed if its name ends in .gz.
        limit: Maximum number of requests to read; None for all.

    Raises:
        TraceError: The file cannot be read, or a line is not a request.
    """
    requests: list[TraceRequest] = []
    try:
        for line in islice(_lines(path), limit):
            requests.append(_parse(line))  # noqa: PERF401 - its length is the line number below
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} line {len(requests) + 1}: truncated or damaged gzip file ({error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} line {len(requests) + 1}: not UTF-8") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except TraceError as error:
        raise TraceError(f"{path} line {len(requests) + 1}: {error}") from error
    if not requests:
        raise TraceError(f"{path} line 1: no requests")
    return requests


def _lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        yield from file


def _parse(line: str) -> TraceRequest:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise TraceError(f"not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise TraceError("not a JSON object")
    _integer(entry, "timestamp", 0, 2**63 - 1)
    input_length = _integer(entry, "input_length", 1, MAX_TOKENS)
    output_length = _integer(entry, "output_length", 0, MAX_TOKENS - input_length)
    hash_ids = entry.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(i) is int and 0 <= i <= _MAX_TOKEN_ID for i in hash_ids):
        raise TraceError("hash_ids: missing, or not a list of integers in [0, 2^32)")
    wanted = -(-input_length // TRACE_BLOCK_TOKENS)
    if len(hash_ids) != wanted:
        raise TraceError(f"hash_ids: {len(hash_ids)} ids, input_length {input_length} needs {wanted}")
    return TraceRequest(input_length, output_length, tuple(hash_ids))


def _integer(entry: dict[str, object], name: str, low: int, high: int) -> int:
    value = entry.get(name)
    if type(value) is not int:
        raise TraceError(f"{name}: missing, or not an integer")
    if not low <= value <= high:
        raise TraceError(f"{name}: {value} is not in [{low}, {high}]")
    return value
