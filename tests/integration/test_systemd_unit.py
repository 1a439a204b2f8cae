"""The systemd unit of a server is valid, and its command accepts the settings that the guide shows."""

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from support import processes
from support.command import kvpool
from support.paths import DOCS, ROOT

UNIT = ROOT / "deploy" / "systemd" / "kvpool@.service"
PROGRAM = "/opt/kvpool/bin/kvpool"


def service() -> dict[str, str]:
    """The options of the section [Service]; configparser makes their names lower-case."""
    unit = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    unit.read_string(UNIT.read_text())
    return dict(unit["Service"])


def settings() -> str:
    """The settings file of the guide."""
    (block,) = re.findall(r"```toml\n(.*?)```", (DOCS / "how-to" / "high-availability.md").read_text(), re.DOTALL)
    return str(block)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_every_option(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(PROGRAM, processes.KVPOOL))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],  # noqa: S607 - as a person would
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "it ignores unknown options, with a warning"


def test_its_command_accepts_the_settings_of_the_guide(tmp_path: Path) -> None:
    path = tmp_path / "llama.toml"
    path.write_text(settings())
    command = service()["execstart"].replace("/etc/kvpool/%i", str(tmp_path / "llama")).replace("%i", "llama")
    command = command.replace("${STATE_DIRECTORY}", str(tmp_path / "state"))
    program, verb, *options = shlex.split(command)
    assert (program, verb) == (PROGRAM, "serve")
    done = kvpool("serve", "--check", *options)
    assert (done.returncode, done.stdout) == (0, "the settings are valid\n"), done.stderr


def test_the_journal_and_the_boot_id_stay_accessible() -> None:
    options = service()
    assert options["statedirectory"] == "kvpool/%i"
    assert "${STATE_DIRECTORY}" in options["execstart"]
    assert options["protectsystem"] == "strict"
    assert "procsubset" not in options, "the journal reads the boot id below /proc/sys"
