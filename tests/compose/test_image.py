"""The images hold what is locked and nothing else, run as nobody in particular, and stop when told to."""

import json
import re
import time
from typing import Any

import pytest

from support_compose import DEPLOY, Stack, docker

SERVER, WORKER = "kvpool-server", "kvpool-worker"
INSTALLED = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
OF_THE_BASE = {"pip", "setuptools", "wheel"}


def config_of(image: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(docker("image", "inspect", image))[0]["Config"]
    return config


def python(image: str, program: str) -> str:
    return docker("run", "--rm", "--read-only", "--entrypoint", "python", image, "-c", program).strip()


def installed(image: str) -> dict[str, str]:
    names = (entry.partition("==") for entry in python(image, INSTALLED).split())
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in names}


def locked(name: str) -> dict[str, str]:
    lines = (DEPLOY / "requirements" / f"{name}.lock").read_text().splitlines()
    found = (re.match(r"([\w.-]+)==([\w.+]+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize(("image", "lock"), [(SERVER, "server"), (WORKER, "worker")])
def test_what_is_installed_is_what_is_locked(image: str, lock: str) -> None:
    packages, wanted = installed(image), locked(lock)
    ours = {name: version for name, version in packages.items() if name in wanted}
    assert ours == {name: version for name, version in wanted.items() if name in packages}
    missing = wanted.keys() - packages.keys()
    assert all("; " in line for line in lines_of(lock, missing)), "only what a marker leaves out"
    others = packages.keys() - wanted.keys() - OF_THE_BASE
    assert others == ({"kvpool"} if lock == "server" else {"kvpool", "torch"})


def lines_of(lock: str, names: set[str]) -> list[str]:
    lines = (DEPLOY / "requirements" / f"{lock}.lock").read_text().splitlines()
    return [line for line in lines if line.partition("==")[0] in names]


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize("image", [SERVER, WORKER])
def test_an_image_runs_as_a_user_without_rights_and_knows_how_to_stop_and_to_be_asked(image: str) -> None:
    config = config_of(image)
    assert (config["User"], config["StopSignal"]) == ("10001:10001", "SIGTERM")
    assert config["Entrypoint"] == ["kvpool"]
    assert config["Healthcheck"]["Test"][:3] == ["CMD", "kvpool", "health"]
    assert python(image, "import os; print(os.getuid(), os.access('/usr/local', os.W_OK))") == "10001 False"
    found = "import glob; print(glob.glob('/src*') + glob.glob('/root/.cache*') + glob.glob('/tests*'))"
    assert python(image, found) == "[]", "nothing of the build is left"


def test_a_stopped_server_drains_and_exits_with_0(stack: Stack) -> None:
    stack.stop_schedulers()
    server = stack.container("server")
    start = time.monotonic()
    stack.compose("stop", "server")
    assert docker("inspect", "--format", "{{.State.ExitCode}}", server).strip() == "0"
    assert time.monotonic() - start < 14, "not killed when its time was up"
    stack.compose("start", "server", "scheduler-0", "scheduler-1")
    stack.wait_ready()
    stack.wait_played_on()
