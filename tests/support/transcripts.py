"""Transcripts: a command per line that begins with `>`, then what it does; `#` begins a comment.

`KVPOOL_REWRITE=1 pytest FILE` writes what commands do now into the transcripts of a test. Read each difference before
it is committed.
"""

import os
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path

Execute = Callable[..., list[str]]
"""Executes a command with its arguments; returns the lines of its output."""


def replay(transcript: str, execute: Execute) -> str:
    """Executes the commands of a transcript. Returns it with the output that they have."""
    lines = []
    for line in transcript.splitlines():
        if line.startswith(">"):
            lines += [line, *execute(*line[1:].split())]
        elif not line or line.startswith("#"):
            lines.append(line)
    return "\n".join(lines) + "\n"


def check(path: Path, execute: Execute) -> None:
    """Compares a transcript with what its commands do now."""
    transcript = path.read_text()
    replayed = replay(transcript, execute)
    if os.environ.get("KVPOOL_REWRITE"):
        path.write_text(replayed)
    else:
        difference = unified_diff(transcript.splitlines(), replayed.splitlines(), str(path), "now", n=2, lineterm="")
        assert replayed == transcript, "\n".join(difference)
