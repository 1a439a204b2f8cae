"""The commands of docs/how-to/secure.md create working certificates and tokens."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.client import DeniedError, TlsConfig, connect
from kvpool.client.admin import AdminClient
from support.paths import DOCS
from support.server import ServerProcess, pool_config

PAGE = DOCS / "how-to/secure.md"


def test_created_certificates_and_tokens_give_access(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "kvpool"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'from kvpool.cli import main; main()' \"$@\"\n")
    command.chmod(0o700)
    scripts = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
        subprocess.run(["/bin/sh", "-e", "-c", script], cwd=tmp_path, env=environment, check=True, capture_output=True)
    auth = {"tls_cert": "server.pem", "tls_key": "server.key", "tokens": "tokens.toml"}
    server = ServerProcess("127.0.0.1:0", auth={name: str(tmp_path / file) for name, file in auth.items()})
    address, tls = server.addresses[0], TlsConfig(tmp_path / "ca.pem", server_name="kvpool-server")
    with connect(address, tls=tls, token=tmp_path / "a.token") as client:
        client.create_pool(pool_config("llama-8b"))
        with pytest.raises(DeniedError):
            client.create_pool(pool_config("gemma"))
    with AdminClient(address, tls=tls, token=tmp_path / "ops.token") as admin:
        assert [pool.config.name for pool in admin.overview().pools] == ["llama-8b"]
    server.stop_cleanly()
