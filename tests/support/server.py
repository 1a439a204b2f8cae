"""Real servers for tests, each in its own process, on a unix socket."""

import contextlib
import json
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig
from kvpool.core.ids import PoolName
from support import processes
from support.bugs import bugs_in

_PROGRAM = """
import asyncio, json, resource, sys
from pathlib import Path
from kvpool.server.config import MetricsConfig, ServerConfig
from kvpool.core.sessions.session import LeaseBounds
from kvpool.core.ranks.messages import RankTiming
from kvpool.server.journal.config import JournalConfig
from kvpool.server.auth.config import AuthConfig
from kvpool.server.limits.config import Limits
from kvpool.server.events.config import EventsConfig
from kvpool.server.app import serve
settings = json.loads(sys.argv[1])
if max_files := settings.pop("max_files", 0):
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files // 2, max_files))
settings["addresses"] = tuple(settings["addresses"])
settings["leases"] = LeaseBounds(**settings.pop("leases", {}))
settings["events"] = EventsConfig(**settings.pop("events", {}))
settings["rank_timing"] = RankTiming(**settings.pop("rank_timing", {}))
settings["journal"] = JournalConfig(**settings.pop("journal", {}))
auth = {name: Path(value) for name, value in settings.pop("auth", {}).items()}
settings["auth"] = AuthConfig(**auth)
settings["limits"] = Limits(**settings.pop("limits", {}))
settings["metrics"] = MetricsConfig(**settings.pop("metrics", {}))
asyncio.run(serve(ServerConfig(**settings), lambda addresses: print(json.dumps(addresses), flush=True)))
"""


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A server in its own process.

    Attributes:
        addresses: The addresses that it listens on.
        process: The process.
    """

    def __init__(self, *addresses: str, **settings: object) -> None:
        argument = json.dumps({"addresses": addresses, **settings})
        self.process = processes.start(
            [sys.executable, "-c", _PROGRAM, argument], stdout=processes.PIPE, stderr=processes.PIPE, text=True
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start: {self.process.communicate()[1]}")
        self.addresses: list[str] = json.loads(line)

    def stop(self) -> tuple[int, str]:
        """Sends SIGTERM. Returns the exit status and the output on stderr."""
        self.process.terminate()
        _, errors = self.process.communicate(timeout=30)
        return self.process.wait(), errors

    def stop_cleanly(self) -> str:
        """Stops the server, even if paused. Fails on a logged bug or an error status. Returns the output on stderr."""
        self.process.send_signal(signal.SIGCONT)
        status, errors = self.stop()
        assert status == 0, errors
        assert not bugs_in(errors), errors
        return errors


@contextlib.contextmanager
def server_process(*addresses: str, **settings: object) -> Iterator[ServerProcess]:
    """Runs a server, by default on a unix socket. Fails if it logged a bug or did not stop cleanly."""
    with TemporaryDirectory() as folder:
        server = ServerProcess(*(addresses or [f"unix:{Path(folder) / 's'}"]), **settings)
        try:
            yield server
        finally:
            server.stop_cleanly()


@contextlib.contextmanager
def running_server(**settings: object) -> Iterator[str]:
    """Runs a `server_process` and yields its address."""
    with server_process(**settings) as server:
        yield server.addresses[0]


def pool_config(name: str = "m", num_blocks: int = 100, **options: object) -> PoolConfig:
    """A small pool of full attention, with 4 tokens per block; too few for a request of maximum length are allowed."""
    groups = (KVCacheGroup(FullAttentionSpec(4), ("layer.0",)),)
    options = {"allow_too_few_blocks": True, **options}
    return PoolConfig(PoolName(name), num_blocks, 1024, groups, **options)  # type: ignore[arg-type]
