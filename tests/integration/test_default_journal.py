"""A server without options keeps a journal in the folder of the user's state."""

import socket
from pathlib import Path

import pytest

from kvpool.client import connect
from support.command import kvpool
from support.server import CommandLineServer, pool_config

UNSET = {"KVPOOL_SERVE_NO_JOURNAL": ""}


def test_killed_servers_continue_each_with_its_own_journal(tmp_path: Path) -> None:
    environment = {**UNSET, "XDG_STATE_HOME": str(tmp_path / "state")}
    addresses = [f"unix:{tmp_path}/{name}" for name in "ab"]
    servers = [CommandLineServer(address, environment=environment) for address in addresses]
    for address, server in zip(addresses, servers, strict=True):
        folder = tmp_path / "state" / "kvpool" / socket.gethostname() / "unix" / address.removeprefix("unix:/")
        server.wait_for(f"server listening .*journal={folder}\n")
        with connect(address) as client:
            client.create_pool(pool_config(Path(address).name))
        server.kill()
    for address, server in zip(addresses, servers, strict=True):
        server.restart()
        with server, connect(address) as client:
            assert client.get_pool(Path(address).name).epoch == 1


def test_a_server_without_a_journal_says_so(tmp_path: Path) -> None:
    with CommandLineServer(f"unix:{tmp_path}/s", options=["--no-journal"]) as server:
        server.wait_for("server listening .*journal=none\n")


@pytest.mark.parametrize("option", [["--check"], []], ids=["check", "start"])
def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path, option: list[str]) -> None:
    (tmp_path / "file").touch()
    environment = {**UNSET, "XDG_STATE_HOME": str(tmp_path / "file")}
    done = kvpool("serve", *option, "--listen", f"unix:{tmp_path}/s", **environment)
    error = f"--journal: {tmp_path}/file: is not a folder; --no-journal serves without one"
    assert (done.returncode, done.stderr) == (1, f"Error: {error}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
