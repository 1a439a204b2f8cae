"""The README's example runs as shown."""

import re
import socket
from pathlib import Path

import pytest

from support_server import ServerProcess

README = Path(__file__).parents[2] / "README.md"
ADDRESS = "unix:/tmp/kvpool.sock"


def test_python_example(capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text()
    assert f"--listen {ADDRESS}" in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = ADDRESS.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            pytest.skip(f"a server of somebody's listens on {ADDRESS}")
    server = ServerProcess(ADDRESS)
    try:
        exec(compile(code, str(README), "exec"), {})  # noqa: S102 - our own README
    finally:
        status, errors = server.stop()
    assert (status, errors) == (0, "")
    table, hit = capsys.readouterr().out.splitlines()
    assert table == str([list(range(1, 64))])
    assert hit == "992"
