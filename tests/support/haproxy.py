"""A real HAProxy in front of servers."""

import csv
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from support.logging_process import LoggingProcess
from support.waiting import DEADLINE_SECONDS, wait_until

needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="haproxy is not installed; on Debian: apt-get install haproxy"
)
_COMMON: Final = """
defaults
  timeout connect 5s
  timeout client 1h
  timeout server 1h
"""
TCP: Final = "listen {name}\n  mode tcp\n  bind {name}\n  server s {target}\n"
"""Forwards bytes from the address `name` to `target`."""
HTTP2: Final = "listen {name}\n  mode http\n  bind {name} proto h2\n  server s {target} proto h2\n"
"""Forwards requests of HTTP/2."""
HTTP1: Final = "listen {name}\n  mode http\n  bind {name}\n  http-request return status 200\n"
"""Answers requests of HTTP/1, and everything else with an error of it."""


class HAProxy(LoggingProcess):
    """A process of HAProxy.

    Args:
        folder: Folder for its files.
        listeners: One of the constants above for each address.
        target: Host of the servers, which listen on the same ports.
    """

    def __init__(self, folder: Path, listeners: Mapping[str, str], target: str = "127.0.0.1") -> None:
        self._socket = folder / "haproxy.sock"
        parts = [f"global\n  stats socket {self._socket}", _COMMON]
        for name, kind in listeners.items():
            parts.append(kind.format(name=name, target=f"{target}:{name.rpartition(':')[2]}"))
        (folder / "haproxy.cfg").write_text("\n".join(parts))
        super().__init__("haproxy", "-db", "-f", str(folder / "haproxy.cfg"))
        wait_until(lambda: self._is_ready() or not self.is_alive)
        assert self.is_alive, self.log

    def num_connections(self, address: str) -> int:
        """Number of connections that clients have made to an address so far."""
        rows = csv.DictReader(self._ask("show stat").removeprefix("# ").splitlines())
        return next(int(row["stot"]) for row in rows if (row["pxname"], row["svname"]) == (address, "FRONTEND"))

    def _is_ready(self) -> bool:
        try:
            return bool(self._ask("show info"))
        except OSError:
            return False

    def _ask(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as stream:
            connection.settimeout(DEADLINE_SECONDS)
            connection.connect(str(self._socket))
            stream.write(f"{command}\n")
            stream.flush()
            return stream.read()
