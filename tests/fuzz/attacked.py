"""A real `kvpool serve` under attack: its process, its log, and a scheduler whose steps must stay correct."""

import json
import os
import resource
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from attacks.tenant import work
from kvpool.client import connect
from kvpool.client.admin import AdminClient
from support.server import CommandLineServer, pool_config
from support.waiting import DEADLINE_SECONDS

POOL: Final = "canary"
_NUM_BLOCKS: Final = 64
_PAUSE_SECONDS: Final = 0.02
"""Time between two rounds of the canary."""


class Server(CommandLineServer):
    """The server, on a free TCP port, with its log as JSON."""

    def __init__(self, *options: str) -> None:
        super().__init__("127.0.0.1:0", options=("--log-format", "json", *options))
        (self.address,) = self.addresses

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def num_files(self) -> int:
        """Number of open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208 - of /proc

    def connect(self) -> socket.socket:
        """Opens a TCP connection to the server."""
        port = int(self.address.rpartition(":")[2])
        connection = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


class Canary:
    """A scheduler that works during the attacks, and knows the correct answer of each step.

    Attributes:
        seconds: How long each of its rounds took.
        error: What it met that it must not, if anything.
    """

    def __init__(self, address: str) -> None:
        self.seconds: list[float] = []
        self.error: BaseException | None = None
        self._address = address
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with connect(self._address) as client:
                client.create_pool(pool_config(POOL, _NUM_BLOCKS))
                with client.open_session(pool=POOL) as session:
                    while not self._done.wait(_PAUSE_SECONDS):
                        started = time.monotonic()
                        work(session, len(self.seconds))
                        assert session.pool().free_blocks == _NUM_BLOCKS - 1
                        self.seconds.append(time.monotonic() - started)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that asserts on it
            self.error = error


def check_alive(server: Server) -> None:
    """Raises unless the server answers an operator, holds the canary's requests only, and logged no bug."""
    assert server.is_alive, "the server died"
    with AdminClient(server.address) as admin:
        pool = next(pool for pool in admin.overview().pools if pool.config.name == POOL)
        assert (pool.config.num_blocks, pool.sessions) == (_NUM_BLOCKS, 1)
        hashed = [block for block in admin.blocks(POOL) if block.block_hash]
        assert len(hashed) >= pool.cached_blocks - 1  # the canary goes on between the two
    bad = [line for line in list(server.lines) if json.loads(line)["level"] in ("ERROR", "CRITICAL")]
    assert not bad, bad[:3]
