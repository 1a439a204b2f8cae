"""The Python examples of the README and of the pages for scheduler authors run as shown."""

import json
import re
import socket
from typing import Any

import pytest

from support.command import kvpool
from support.paths import DOCS, MODEL_CONFIGS, ROOT
from support.server import ServerProcess

README = ROOT / "README.md"
PAGES = (
    README,
    *(DOCS / page for page in ("tutorials/first-pool.md", "how-to/write-a-scheduler.md", "how-to/asyncio.md")),
)
ADDRESS = "unix:/tmp/kvpool.sock"


def test_python_examples(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [page.read_text() for page in PAGES]
    assert f"--listen {ADDRESS}" in texts[0]
    examples = [code for text in texts for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    assert len(examples) == 4
    path = ADDRESS.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            pytest.skip(f"another server listens on {ADDRESS}")
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("builtins.input", lambda _: seen.extend(tutorial_pools()))
    with ServerProcess(ADDRESS) as server:
        for code in examples:
            exec(compile(code, "docs", "exec"), {})  # noqa: S102 - our own pages
    assert " WARNING " not in server.log
    table = str([list(range(1, 64))])
    assert capsys.readouterr().out.splitlines() == [table, "992", table, "992", "[[[]]] {}", "[[1, 2, 3, 4, 5, 6, 7]]"]
    # While the tutorial waits for Enter, its two sessions hold 62 common blocks and one each.
    (pool,) = (pool for pool in seen if pool["config"]["name"] == "tutorial")
    assert (pool["sessions"], [group["used_blocks"] for group in pool["groups"]]) == (2, [64])


def tutorial_pools() -> list[dict[str, Any]]:
    """What the command of the tutorial that lists pools prints."""
    (command,) = re.findall(r"\$ kvpool (pools .*)", PAGES[1].read_text())
    done = kvpool(*command.split(), "--json")
    pools: list[dict[str, Any]] = json.loads(done.stdout)["pools"]
    return pools


def test_plan_command() -> None:
    page = (DOCS / "how-to" / "plan-and-replay.md").read_text()
    (command,) = [line for line in re.findall(r"\$ kvpool (plan .*)", page) if "--with-vllm" not in line]
    config = MODEL_CONFIGS / "gemma-3-27b-it.json"
    arguments = command.replace("gemma-3-27b-it/config.json", str(config)).split()
    done = kvpool(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "52 SlidingWindow, 10 FullAttention" in done.stdout
