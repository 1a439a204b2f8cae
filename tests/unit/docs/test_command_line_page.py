"""The command line page lists every command."""

import re

from kvpool.cli import main
from support.paths import DOCS


def test_every_command_is_listed() -> None:
    page = (DOCS / "reference" / "command-line.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `kvpool ([a-z-]+)`", page, re.MULTILINE))
    assert listed == set(main.list_commands(main.make_context("kvpool", ["top", "--help"], resilient_parsing=True)))
