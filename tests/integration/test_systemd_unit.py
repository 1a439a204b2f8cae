"""The systemd units are valid, and their commands run with the settings that the guides show."""

import configparser
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from support import processes
from support.command import kvpool
from support.lending import engine
from support.logging_process import LoggingProcess
from support.paths import DOCS, ROOT
from support.server import CommandLineServer

UNITS = ROOT / "deploy" / "systemd"
SERVER, WORKER = UNITS / "kvpool@.service", UNITS / "kvpool-worker@.service"
PROGRAM = "/opt/kvpool/bin/kvpool"
HOST_MEMORY = 'host_memory = "1MiB"\n'
"""What the guide says beside its settings, for less memory."""


def service(path: Path) -> dict[str, str]:
    """The options of the section [Service]; configparser makes their names lower-case."""
    unit = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    unit.read_string(path.read_text())
    return dict(unit["Service"])


def settings(page: str) -> list[str]:
    """The settings files of a guide."""
    return re.findall(r"```toml\n(.*?)```", (DOCS / "how-to" / page).read_text(), re.DOTALL)


def options(unit: Path, instance: str, folder: Path, text: str) -> list[str]:
    """Writes the settings of an instance; returns the options of its command, with all files in a folder."""
    (folder / f"{instance}.toml").write_text(text.replace("/run/kvpool", str(folder)))
    command = service(unit)["execstart"].replace("/etc/kvpool", str(folder)).replace("%i", instance)
    program, verb, *found = shlex.split(command.replace("${STATE_DIRECTORY}", str(folder / "state")))
    assert (program, verb) == (PROGRAM, "serve" if unit == SERVER else "worker")
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("path", [SERVER, WORKER], ids=lambda path: path.name)
def test_systemd_accepts_every_option(path: Path, tmp_path: Path) -> None:
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace(PROGRAM, processes.KVPOOL))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],  # noqa: S607 - as a person would
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "it ignores unknown options, with a warning"


def test_a_pair_accepts_the_settings_of_the_guide(tmp_path: Path) -> None:
    (text,) = settings("high-availability.md")
    done = kvpool("serve", "--check", *options(SERVER, "llama", tmp_path, text))
    assert (done.returncode, done.stdout) == (0, "the settings are valid\n"), done.stderr


def test_an_engine_finds_server_and_lender_of_the_guide() -> None:
    serving, lending = settings("deploy.md")
    here = {"KVPOOL_WORKER_DEVICE": "cpu", "KVPOOL_WORKER_MEMORY": "1MiB", "KVPOOL_WORKER_POOL": "m"}
    with tempfile.TemporaryDirectory() as name:  # paths of sockets are short
        folder = Path(name)
        here["KVPOOL_WORKER_LEND_FOLDER"] = name
        for each in ("llama", "llama-0"):
            (folder / each).mkdir()
        with (
            CommandLineServer(
                options=options(SERVER, "llama", folder, serving), environment={"KVPOOL_SERVE_NO_JOURNAL": ""}
            ) as server,
            LoggingProcess(
                processes.KVPOOL, "worker", *options(WORKER, "llama-0", folder, lending + HOST_MEMORY), environment=here
            ) as worker,
        ):
            worker.wait_for("lending")
            with engine(*server.addresses, f"unix:{folder}/llama-0/memory.sock") as mapping:
                assert mapping.session_number
                assert worker.wait_for("host memory allocated")


def test_what_must_outlive_a_process_stays_accessible() -> None:
    server, worker = service(SERVER), service(WORKER)
    assert server["statedirectory"] == "kvpool/%i"
    assert "${STATE_DIRECTORY}" in server["execstart"]
    assert "procsubset" not in server, "the journal reads the boot id below /proc/sys"
    assert server["protectsystem"] == worker["protectsystem"] == "strict", "which leaves /dev/shm writable"
    assert worker["killmode"] == "process", "the holder of memory on a GPU is its child"
    assert worker["runtimedirectorypreserve"] == "restart"
    assert not {"privatedevices", "protectclock", "deviceallow"} & worker.keys(), "they would take the GPU away"
