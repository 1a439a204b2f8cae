"""Prose uses plain technical English: words of the project's former dialect do not come back.

The list is short on purpose. Each entry has a better word, and no entry has a proper use in this project.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

BETTER = {
    r"told|tells? of": "reported, sent; or name what the message holds",
    r"anew": "again, or restart",
    r"whoever|whomever": "the caller, the client, the process that",
    r"nobody('s)?": "no session, no client, no process",
    r"for ever": "indefinitely, or until it is stopped",
    r"quiet(ly|er)?": "within its credit; silent, of a connection",
    r"heard (of|from)": "seen, received from",
    r"(take|takes|took|taking) note of": "record, count",
    r"lets? go of": "release",
    r"no good": "invalid, expired",
    r"so many": "the number of",
    r"(bytes|tokens|blocks|times|once|twice|messages|microseconds|milliseconds|us|ms|requests|steps|examples|lines?|entries)"
    r" an? (step|second|minute|hour|request|block|token|rank|pool|session|group|event|operation|call|layer)": "per",
}
PATTERNS = [(re.compile(rf"\b({word})\b", re.IGNORECASE), better) for word, better in BETTER.items()]
LEFT_OUT = {ROOT / "CHANGELOG.md", Path(__file__).resolve()}
"""The history of releases stays as it was written."""

SUFFIXES = {".py", ".proto", ".md"}


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and text of a file's prose: comments and strings of Python, all of other files."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) and " " in token.string:  # else a name or a path
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


@pytest.mark.parametrize(
    "folder", ["server", "client", "gpu_worker", "proto", "benchmarks", "examples", "tests", "docs"]
)
def test_prose_of_a_folder_is_plain(folder: str) -> None:
    check([path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES and "_pb2" not in path.name])


def test_prose_of_the_first_pages_is_plain() -> None:
    check(list(ROOT.glob("*.md")))


def check(paths: list[Path]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group(0)!r}; better: {better}"
        for path in sorted(paths)
        if path not in LEFT_OUT
        for number, line in prose_of(path)
        for pattern, better in PATTERNS
        if (match := pattern.search(line))
    ]
    assert paths
    assert not found, f"{len(found)} places\n" + "\n".join(found)
