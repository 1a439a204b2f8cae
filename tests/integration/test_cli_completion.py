"""Shell completion, with the commands of the documentation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import DOCS
from support.waiting import DEADLINE_SECONDS

PAGE = DOCS / "reference" / "command-line.md"
BIN = Path(sys.executable).parent


def run(script: str, home: Path) -> str:
    environment = {**os.environ, "HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", script],  # noqa: S607 - the user's bash
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=True,
        env=environment,
    )
    return done.stdout


@pytest.fixture(scope="module", name="home")
def fixture_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    section = PAGE.read_text(encoding="utf-8").partition("## Shell completion")[2]
    commands = re.findall(r"^\$ (.*)$", section, re.MULTILINE)
    assert len(commands) == 4
    run("\n".join(commands), home)
    return home


def test_the_documented_commands_write_a_file_per_shell(home: Path) -> None:
    for file in (".zfunc/_kvpool", ".config/fish/completions/kvpool.fish"):
        assert "_KVPOOL_COMPLETE" in (home / file).read_text()


@pytest.mark.parametrize(
    ("words", "completed"),
    [("kvpool dr", "drain"), ("kvpool drain --un", "--undo"), ("kvpool serve --che", "--check")],
)
def test_bash_completes_commands_and_options(home: Path, words: str, completed: str) -> None:
    script = (
        "source ~/.local/share/bash-completion/completions/kvpool\n"
        f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        '_kvpool_completion kvpool; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert run(script, home).split() == [completed]
