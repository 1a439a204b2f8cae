"""`kvpool serve --help` shows every option once, in sections."""

import re

from click.testing import CliRunner

from kvpool.cli import main
from kvpool.cli.serve import serve


def test_options_are_in_sections() -> None:
    shown = CliRunner().invoke(main, ["serve", "--help"]).output
    flags = [flag for param in serve.params for flag in param.opts]
    assert re.findall(r"^  (?:-h, )?(--[a-z-]+)", shown, re.MULTILINE) == [*flags, "--help"]
    sections = dict(re.findall(r"^(\S.*):\n((?:(?:  .*)?\n)+)", shown, re.MULTILINE))
    assert "--journal-max-bytes" in sections["Journal and epochs"]
    assert "--tokens" in sections["TLS and tokens"]
    assert "--max-sessions" in sections["Limits on clients"]
    assert "--log-level" in sections["Logs and help"]
    assert "Options" not in sections
