"""The images contain exactly the locked packages, run unprivileged, and stop on a signal."""

import json
import re
from typing import Any

import pytest

from support.compose import DEPLOY, Stack, docker

SERVER, WORKER = "kvpool-server", "kvpool-worker"
INSTALLED = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
OF_TORCH = re.compile("nvidia-|cuda-|triton")  # pinned by torch's GPU builds themselves
OF_THE_BASE = {"pip", "setuptools", "wheel"}


def config_of(image: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(docker("image", "inspect", image))[0]["Config"]
    return config


def python(image: str, program: str) -> str:
    return docker("run", "--rm", "--read-only", "--entrypoint", "python", image, "-c", program).strip()


def installed(image: str) -> dict[str, str]:
    names = (entry.partition("==") for entry in python(image, INSTALLED).split())
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in names}


def locked(*names: str) -> dict[str, list[tuple[str, str]]]:
    """Versions by package, each with the marker of its environments."""
    found: dict[str, list[tuple[str, str]]] = {}
    lines = (line for name in names for line in (DEPLOY / "requirements" / f"{name}.lock").read_text().splitlines())
    for line in lines:
        if match := re.match(r"([\w.-]+)==([\w.+]+)(?: ; ([^\\]+))?", line):
            found.setdefault(match[1], []).append((match[2], match[3] or ""))
    return found


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize(
    ("image", "locks", "ours"),
    [(SERVER, ["server"], {"kvpool"}), (WORKER, ["server", "beside-torch"], {"kvpool", "torch"})],
)
def test_installed_packages_match_the_lock_files(image: str, locks: list[str], ours: set[str]) -> None:
    packages, wanted = installed(image), locked(*locks)
    for name, versions in wanted.items():
        if name in packages:
            assert packages[name] in [version for version, _ in versions]
        else:
            assert all(marker for _, marker in versions), f"{name} is wanted everywhere"
    others = {name for name in packages.keys() - wanted.keys() - OF_THE_BASE if not OF_TORCH.match(name)}
    assert others == ours


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize("image", [SERVER, WORKER])
def test_images_run_unprivileged_with_stop_signal_and_health_check(image: str) -> None:
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
    stack.compose("stop", "server")
    assert docker("inspect", "--format", "{{.State.ExitCode}}", server).strip() == "0", (
        "not killed when its time was up"
    )
    stack.compose("start", "server", "scheduler-0", "scheduler-1")
    stack.wait_ready()
    stack.wait_played_on()
