"""A real `kvpool serve` under attack: its process, its log, and a scheduler whose steps must stay correct."""

import json
import os
import resource
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvpool.client import connect
from kvpool.client.admin import AdminClient
from support import processes
from support.server import pool_config

POOL: Final = "canary"
_KVPOOL: Final = str(Path(sys.executable).parent / "kvpool")
_NUM_BLOCKS: Final = 64
_START_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.02
"""Time between two rounds of the canary."""


class Server:
    """The process, on a free TCP port, with its log as JSON in a file."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._log = folder / "log.json"
        command = [_KVPOOL, "serve", "--listen", "127.0.0.1:0", "--log-format", "json", *options]
        with self._log.open("w") as log:
            self.process = processes.start(command, stderr=log, stdout=processes.DEVNULL)
        self.port = self._wait_for_port()
        self.address = f"127.0.0.1:{self.port}"

    def _wait_for_port(self) -> int:
        due = time.monotonic() + _START_SECONDS
        while time.monotonic() < due and self.process.poll() is None:
            for entry in self.log():
                if entry["message"] == "server listening":
                    return int(entry["addresses"][0].rpartition(":")[2])
            time.sleep(0.05)
        self.kill()
        raise AssertionError(self._log.read_text(errors="replace"))

    def log(self) -> list[dict[str, Any]]:
        """Reads the log; raises if a line is malformed."""
        lines = self._log.read_text(errors="replace").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def num_files(self) -> int:
        """Number of open file descriptors."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208 - of /proc

    def connect(self) -> socket.socket:
        """Opens a TCP connection to the server."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def stop(self) -> int:
        """Terminates the process; returns its exit status."""
        self.process.terminate()
        return self.process.wait(30)

    def kill(self) -> None:
        """Kills the process in any state."""
        self.process.kill()
        self.process.wait()


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
                    number = 0
                    while not self._done.wait(_PAUSE_SECONDS):
                        number += 1
                        started = time.monotonic()
                        self._round(session, number)
                        self.seconds.append(time.monotonic() - started)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that asserts on it
            self.error = error

    def _round(self, session: Any, number: int) -> None:
        request = session.request(f"r{number}", range(16))
        admitted = session.admit(request)
        hit = 0 if number == 1 else 12
        assert (admitted.num_hit_tokens, admitted.num_new_tokens) == (hit, 16 - hit), admitted
        request.append([number])
        assert session.allocate_slots(request, 1) is not None
        assert len({block_id for table in request.block_ids for block_id in table}) == 5
        session.free(request)
        assert session.pool().free_blocks == _NUM_BLOCKS - 1


def check_alive(server: Server) -> None:
    """Raises unless the server answers an operator, holds the canary's requests only, and logged no bug."""
    assert server.process.poll() is None, "the server died"
    with AdminClient(server.address) as admin:
        pool = next(pool for pool in admin.overview().pools if pool.config.name == POOL)
        assert (pool.config.num_blocks, pool.sessions) == (_NUM_BLOCKS, 1)
        hashed = [block for block in admin.blocks(POOL) if block.block_hash]
        assert len(hashed) >= pool.cached_blocks - 1  # the canary goes on between the two
    bad = [entry for entry in server.log() if entry["level"] in ("ERROR", "CRITICAL", "error", "critical")]
    assert not bad, bad[:3]
