"""Logs of the processes of a run: JSON lines, each written with one write() before the next thing is done.

What was written outlives a SIGKILL; only the last line of a process can be torn. Times are of the machine's monotonic
clock, the same in all its processes.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Log:
    """A process' own file; a process that takes its place later goes on in it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.write("start", pid=os.getpid())

    def write(self, kind: str, **fields: object) -> None:
        """Writes a record down, and the time."""
        line = json.dumps({"kind": kind, "at": time.monotonic(), **fields}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")


class BriefLog(Log):
    """Leaves out what is asked, and of answers all but their times: for runs that are not judged by them."""

    def write(self, kind: str, **fields: object) -> None:
        """Writes a record down, unless it is one of the many."""
        if kind == "told":
            super().write(kind, sent=fields["sent"])
        elif kind not in ("ask", "full"):
            super().write(kind, **fields)


def read(path: Path) -> Iterator[Record]:
    """Reads a log; a line torn by the death of its process is left out."""
    for line in path.read_bytes().split(b"\n"):
        # A torn line has the next process' first record at its end.
        start = line.rfind(b'{"kind":')
        if start >= 0 and line.endswith(b"}"):
            yield json.loads(line[start:])
