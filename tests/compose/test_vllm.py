"""The profile `vllm`: a server, a lender and two vLLM engines in containers, and the image that they run."""

import json
import re
from collections.abc import Iterator

import pytest

from support.compose import WORKERS, Stack, docker, eventually

pytestmark = [pytest.mark.complete, pytest.mark.timeout(3600)]

IMAGE = "kvpool-vllm"
SERVICES = ("vllm-requests", "vllm-1", "vllm-0", "vllm-lender", "vllm-server")
BUILD_SECONDS = 2400.0
START_SECONDS = 900.0
PROGRAM = """
from importlib.metadata import entry_points, version
names = [point.name for point in entry_points(group="vllm.general_plugins")]
print(version("vllm"), version("torch"), "kvpool" in names)
"""


@pytest.fixture(scope="module")
def vllm(stack: Stack) -> Iterator[Stack]:
    """The stack with the image, and without ranks and schedulers, which would compute meanwhile."""
    with stack.settings(VLLM_PORT_0="0", VLLM_PORT_1="0"):  # any: nothing connects to them
        stack.compose("--profile", "vllm", "build", "vllm-server", timeout_seconds=BUILD_SECONDS)
        stack.stop_schedulers()
        stack.compose("stop", *WORKERS)
        yield stack
        stack.compose("--profile", "vllm", "rm", "--stop", "--force", *SERVICES)
    stack.compose("up", "-d", "--no-build")
    stack.wait_at_work()


def test_two_engines_find_each_others_prefixes(vllm: Stack) -> None:
    vllm.compose("--profile", "vllm", "up", "-d", "--no-build", "vllm-requests", timeout_seconds=START_SECONDS)

    def printed() -> list[tuple[str, str, str]]:
        logs = vllm.compose("--profile", "vllm", "logs", "--no-color", "vllm-requests")
        return re.findall(r"http://(\S+):8000: prompt_tokens=(\d+) cached_tokens=(\d+)", logs)

    found = eventually("two answers", lambda: answers if len(answers := printed()) == 2 else None, 120)
    assert found == [("vllm-0", "200", "0"), ("vllm-1", "200", "192")]
    logs = vllm.compose("--profile", "vllm", "logs", "--no-color", "vllm-0", "vllm-1")
    sockets = "memory=unix:/run/kvpool/memory-{rank}.sock address=unix:/run/kvpool/server.sock"
    use = f"engine uses kvpool pool=tiny {sockets}"
    assert logs.count(use) == 2, logs
    pool = vllm.local_pool("vllm-server")
    assert (pool.sessions, pool.requests, len(pool.ranks)) == (2, 0, 1)
    assert pool.prefix_cache.shared_hits_tokens == 192
    assert pool.config.num_host_blocks


@pytest.mark.usefixtures("vllm")
def test_the_image_is_vllm_serve_unprivileged_with_the_plugin() -> None:
    config = json.loads(docker("image", "inspect", IMAGE))[0]["Config"]
    assert (config["User"], config["Entrypoint"]) == ("10001:10001", ["vllm", "serve"])
    version, torch, has_plugin = docker("run", "--rm", "--entrypoint", "python3", IMAGE, "-c", PROGRAM).split()
    assert (version, torch.partition("+")[0], has_plugin) == ("0.32.0+cpu", "2.13.0", "True")
