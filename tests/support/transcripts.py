"""Transcripts: a command per line that begins with `>`, then what it does; `#` begins a comment.

`KVPOOL_REWRITE=1 pytest FILE` writes what commands do now into the transcripts of a test. Read each difference before
it is committed. A test whose transcript was written so fails once.
"""

import os
from collections.abc import Callable, Sequence
from difflib import unified_diff
from pathlib import Path

from kvpool.core.errors import KvpoolError

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
    """Compares a transcript, which has commands, with what they do now."""
    transcript = path.read_text()
    assert any(line.startswith(">") for line in transcript.splitlines()), f"{path} has no command"
    replayed = replay(transcript, execute)
    if os.environ.get("KVPOOL_REWRITE"):
        path.write_text(replayed)
    difference = unified_diff(transcript.splitlines(), replayed.splitlines(), str(path), "now", n=2, lineterm="")
    assert replayed == transcript, "\n".join(difference)


def arguments(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words of a command, and its options, as `epoch=4`."""
    options = dict(word.split("=") for word in words if "=" in word)
    return [word for word in words if "=" not in word], options


class Played:
    """What a transcript is about: a method `_do_x` per command x.

    Attributes:
        lines: The output of the running command.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._shown = ""

    def execute(self, command: str, *words: str) -> list[str]:
        """Executes a command; returns its output, with the state if that changed."""
        self.lines.clear()
        named, options = arguments(words)
        try:
            getattr(self, f"_do_{command}")(*named, **options)
        except KvpoolError as error:
            self.lines.append(f"refused: {error.reason}")
        state = self._state()
        self.lines += [] if state == self._shown else [state]
        self._shown = state
        return list(self.lines)

    def _state(self) -> str:
        """The state; always the same if it is not shown."""
        return ""
