"""Real servers for tests, each in its own process."""

import contextlib
import json
import random
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, TracebackType
from typing import Final

from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig
from kvpool.core.ids import PoolName
from support import faults as fault_points
from support import processes
from support.bugs import bugs_in
from support.logging_process import LoggingProcess

KVPOOL: Final = (processes.KVPOOL,)
_SETTINGS: Final = {"KVPOOL_SERVE_DEFAULT_LEASE_SECONDS": "60", "KVPOOL_SERVE_NO_JOURNAL": "1"}
"""No session ends because the machine is slow. A journal is kept where a test says so."""
_PROGRAM: Final = (processes.PYTHON, "-m", "support.server_program")


def free_port(count: int = 1) -> int:
    """The first of some TCP ports in a row that are free now. The system gives none of them to other connections."""
    while True:
        port = random.randrange(10_000, 32_000)  # noqa: S311 - no secret
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for number in range(port, port + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port


class CommandLineServer(LoggingProcess):
    """A process of `kvpool serve`. At the end of a context it is stopped, and must stop cleanly, if it was not killed.

    Args:
        *addresses: The addresses to listen on.
        options: Further options of the command.
        command: What runs in place of `kvpool`, if there are no faults.
        prefix: What to put before the command.
        environment: See `LoggingProcess`.
        faults: Fault points to arm; see `support.faults`.
        stderr: See `LoggingProcess`.
        waits: Whether to wait until it listens.

    Raises:
        AssertionError: It ended before it listened. Shows its log.
    """

    def __init__(  # noqa: PLR0913 - a command, and how it runs
        self,
        *addresses: str,
        options: Sequence[object] = (),
        command: Sequence[str] = KVPOOL,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        faults: str = "",
        stderr: int = processes.PIPE,
        waits: bool = True,
    ) -> None:
        if faults:
            command, environment = _PROGRAM, {**environment, fault_points.VARIABLE: faults}
        environment = {**_SETTINGS, **environment}
        listen = [part for address in addresses for part in ("--listen", address)]
        super().__init__(
            *prefix, *command, "serve", *listen, *map(str, options), environment=environment, stderr=stderr
        )
        if waits:
            self.wait_until_listening()

    def restart(self) -> None:
        """See `LoggingProcess.restart`. Waits until the server listens."""
        super().restart()
        self.wait_until_listening()

    @property
    def addresses(self) -> list[str]:
        """The addresses on which it listens."""
        return self.wait_until_listening()

    def wait_until_listening(self) -> list[str]:
        """Waits until it listens; returns the addresses."""
        try:
            line = self.wait_for(r'kvpool: listening on |"server listening"')
        except AssertionError:
            self.kill()
            raise
        if line.startswith("{"):
            addresses: list[str] = json.loads(line)["addresses"]
            return addresses
        return line.strip().removeprefix("kvpool: listening on ").split(", ")

    def stop_cleanly(self, expected: Iterable[str] = ()) -> str:
        """Stops it, even if it is paused. Fails on an error status or a logged bug. Returns the log.

        Args:
            expected: Parts of lines that are no bugs.
        """
        status = self.stop()
        assert status == 0, self.log
        assert not bugs_in(self.log, expected), self.log
        return self.log

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self.process.poll() != -signal.SIGKILL:
                self.stop_cleanly()
        finally:
            self.kill()


class ServerProcess(CommandLineServer):
    """A server with settings that need no options.

    Args:
        *addresses: The addresses to listen on.
        **settings: Attributes of `ServerConfig`, those of a configuration in it as a dictionary; and `max_files`, its
            maximum number of open files.

    Raises:
        AssertionError: See `CommandLineServer`.
    """

    def __init__(self, *addresses: str, **settings: object) -> None:
        super().__init__(*addresses, command=_PROGRAM, environment={"KVPOOL_SETTINGS": json.dumps(settings)})


@contextlib.contextmanager
def server_process(*addresses: str, **settings: object) -> Iterator[ServerProcess]:
    """Runs a server, by default on a unix socket. Fails if it logged a bug or did not stop cleanly."""
    with (
        TemporaryDirectory() as folder,
        ServerProcess(*(addresses or [f"unix:{Path(folder) / 's'}"]), **settings) as server,
    ):
        yield server


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
