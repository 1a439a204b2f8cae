"""Logs of the processes of a run: JSON lines, each written with one write() before the next action.

Written lines survive a SIGKILL; only the last line of a process can be torn. Times are of the machine's monotonic
clock, which all processes share.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Log:
    """The log file of a process. Its successor appends to the same file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.write("start", pid=os.getpid())

    def write(self, kind: str, **fields: object) -> None:
        """Writes a record with the current time."""
        line = json.dumps({"kind": kind, "at": time.monotonic(), **fields}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")


class BriefLog(Log):
    """A log without requests, and with the times of answers only, for runs that do not check ownership."""

    def write(self, kind: str, **fields: object) -> None:
        """Writes a record, shortened or omitted if it is frequent."""
        if kind == "answered":
            super().write(kind, sent=fields["sent"])
        elif kind not in ("ask", "full"):
            super().write(kind, **fields)


def read(path: Path) -> Iterator[Record]:
    """Reads a log without lines torn by the death of a process."""
    for line in path.read_bytes().split(b"\n"):
        # A torn line ends with the next process' first record.
        start = line.rfind(b'{"kind":')
        if start >= 0 and line.endswith(b"}"):
            yield json.loads(line[start:])
