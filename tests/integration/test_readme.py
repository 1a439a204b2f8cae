"""The README's examples run as shown."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import MODEL_CONFIGS, ROOT
from support.server import ServerProcess

README = ROOT / "README.md"
ADDRESS = "unix:/tmp/kvpool.sock"


def test_python_examples(capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text()
    assert f"--listen {ADDRESS}" in text
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    path = ADDRESS.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            pytest.skip(f"a server of somebody's listens on {ADDRESS}")
    server = ServerProcess(ADDRESS)
    try:
        for code in examples:
            exec(compile(code, str(README), "exec"), {})  # noqa: S102 - our own README
    finally:
        status, errors = server.stop()
    assert (status, errors) == (0, "")
    table, hit, decoded = capsys.readouterr().out.splitlines()
    assert table == str([list(range(1, 64))])
    assert hit == "992"
    assert decoded == "[[[]]] {}"


def test_plan_command() -> None:
    (command,) = re.findall(r"\$ kvpool (plan .*)", README.read_text())
    config = MODEL_CONFIGS / "gemma-3-27b-it.json"
    arguments = command.replace("gemma-3-27b-it/config.json", str(config)).split()
    done = subprocess.run(
        [str(Path(sys.executable).parent / "kvpool"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "52 SlidingWindow, 10 FullAttention" in done.stdout
