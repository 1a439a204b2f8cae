"""Where `kvpool serve` keeps its journal."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from kvpool.server import app
from kvpool.server.config import ServerConfig
from support.command import kvpool

STATE = f"/state/kvpool/{socket.gethostname()}"
FolderOf: TypeAlias = Callable[..., str]
UNIX = ("--listen", "unix:/run/a/../k.sock")


@pytest.fixture
def folder_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FolderOf:
    """Gives the folder of a server's journal for the arguments, a file of settings, and the environment."""
    started: list[ServerConfig] = []

    async def serve(config: ServerConfig, _: object) -> bool:
        started.append(config)
        return False

    def folder(*arguments: object, settings: str = "", **environment: str) -> str:
        (tmp_path / "serve.toml").write_text(settings)
        environment = {"KVPOOL_SERVE_NO_JOURNAL": "", "XDG_STATE_HOME": "/state", **environment}
        done = kvpool("serve", "--config", tmp_path / "serve.toml", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return started.pop().journal.folder

    monkeypatch.setattr(app, "serve", serve)
    monkeypatch.setattr("kvpool.cli.serve.check_folder", lambda _: None)
    return folder


@pytest.mark.parametrize(
    ("arguments", "settings", "environment", "expected"),
    [
        ((), "", {}, f"{STATE}/127.0.0.1:50051"),
        (("--listen", "[::1]:7", "--listen", "127.0.0.1:0"), "", {}, f"{STATE}/[::1]:7"),
        (UNIX, "", {}, f"{STATE}/unix/run/k.sock"),
        (UNIX, "", {"XDG_STATE_HOME": "relative", "HOME": "/home/me"}, f"/home/me/.local{STATE}/unix/run/k.sock"),
        (("--listen", "127.0.0.1:0"), "", {}, ""),
        (("--listen", "127.0.0.1:0", "--journal", "/j"), "", {}, "/j"),
        (("--no-journal",), "", {}, ""),
        (("--no-journal",), "", {"KVPOOL_SERVE_JOURNAL": "/j"}, ""),
        (("--no-journal", "--journal", "/j"), "", {}, ""),
        (("--journal", "/j"), "", {"KVPOOL_SERVE_NO_JOURNAL": "1"}, "/j"),
        ((), "journal = '/j'", {"KVPOOL_SERVE_NO_JOURNAL": "1"}, ""),
        ((), "no_journal = true", {"KVPOOL_SERVE_JOURNAL": "/j"}, "/j"),
        ((), "no_journal = true", {}, ""),
    ],
)
def test_the_folder_of_the_journal(
    folder_of: FolderOf, arguments: tuple[str, ...], settings: str, environment: dict[str, str], expected: str
) -> None:
    assert folder_of(*arguments, settings=settings, **environment) == expected
