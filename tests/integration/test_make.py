"""The targets of the Makefile."""

import re
import subprocess

from support.paths import ROOT
from support.waiting import DEADLINE_SECONDS


def test_help_says_what_each_target_does() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {name for names in re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE) for name in names.split()}
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"],  # noqa: S607 - the make of the machine
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_SECONDS,
    )
    described = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    assert described.keys() == {name for name in targets if "/" not in name}
    assert {"demo", "test", "clean"} < described.keys()
