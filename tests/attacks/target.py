"""A real `kvpool serve` with TLS, tokens, a journal and metrics, and the tenants that work on it."""

import json
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Final

import grpc

from kvpool.client import Client, KvpoolError, UnauthenticatedError, connect
from kvpool.client.admin import AdminClient
from kvpool.wire.channels import CHANNEL_OPTIONS, ClientCredentials
from support import processes
from support.auth import Authority, Entry, secret_of, write_tokens
from support.logging_process import LoggingProcess
from support.server import CommandLineServer, free_port, pool_config
from support.waiting import DEADLINE_SECONDS, wait_until

TENANTS: Final = ("tenant-0", "tenant-1")
TOKENS: Final[list[Entry]] = [
    *({"name": name, "role": "scheduler", "pools": ["*"]} for name in (*TENANTS, "attacker", "revoked")),
    {"name": "operator", "role": "admin", "pools": ["*"]},
    {"name": "stranger", "role": "scheduler", "pools": ["stranger"]},
    {"name": "watcher", "role": "watcher", "pools": ["*"]},
    {"name": "rank", "role": "worker", "pools": ["*"]},
    {"name": "standby", "role": "standby", "pools": ["*"]},
]
MAX_POOLS: Final = 8
_CHANGED_POOLS: Final = 2
"""Number of names that come and go. A cluster keeps the name of a removed pool for a while, and counts it."""


class Target:
    """The server and its files.

    Args:
        folder: Empty folder for the files.
        prefix: What to put before the server's command, for example to limit its resources.
        stderr: Where the server logs.
        options: More options of the server.

    Attributes:
        folder: Folder of all files.
        journal: Folder of the journal.
        tokens: The token file.
        authority: The authority of all certificates.
        tls_options: Options of a server with a certificate for this machine.
        server: The server.
        port: Port of the calls.
        metrics_port: Port of the metrics.
    """

    def __init__(
        self, folder: Path, prefix: Sequence[str] = (), stderr: int = processes.PIPE, options: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.tokens = folder / "tokens.toml"
        self.port, self.metrics_port = free_port(), free_port()
        self.authority = Authority(folder, "ca")
        certificate = self.authority.issue("localhost", "127.0.0.1")
        self.tls_options = ["--tls-cert", str(certificate.cert), "--tls-key", str(certificate.key)]
        write_tokens(self.tokens, TOKENS)
        all_options: list[object] = ["--metrics-listen", f"127.0.0.1:{self.metrics_port}", "--log-format", "json"]
        all_options += ["--tokens", self.tokens, "--journal", self.journal, "--max-pools", MAX_POOLS]
        all_options += [*self.tls_options, *self.more_options(), *options]
        self.server = CommandLineServer(self.address, options=all_options, prefix=prefix, stderr=stderr, waits=False)
        wait_until(lambda: not self.server.is_alive or self.is_ready(), "the server is ready")
        assert self.server.is_alive, self.server.log

    def more_options(self) -> list[object]:
        """Options of the kind of target; called before the server starts."""
        return []

    @property
    def address(self) -> str:
        """Address of the calls."""
        return f"localhost:{self.port}"

    def is_ready(self) -> bool:
        """Whether `/readyz` answers with success."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.metrics_port}/readyz", timeout=DEADLINE_SECONDS
            ) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def is_journal_up(self) -> bool:
        """The metric of the journal. False if the server does not answer, for example because it is busy."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=DEADLINE_SECONDS
            ) as answer:
                return "\nkvpool_journal_up 1.0\n" in answer.read().decode()
        except (OSError, HTTPException):
            return False

    def connect(self, name: str, deadline_seconds: float = 60.0) -> Client:
        """A client with the token of that name."""
        tls = self.authority.trusted_by()
        return connect(self.address, tls=tls, token=secret_of(name), deadline_seconds=deadline_seconds)

    def admin(self) -> AdminClient:
        """An operator's client."""
        tls = self.authority.trusted_by()
        return AdminClient(self.address, tls=tls, token=secret_of("operator"), deadline_seconds=60.0)

    def channel(self, name: str | None) -> grpc.Channel:
        """A channel over a connection of its own, with the token of that name; None for no token."""
        access = ClientCredentials(self.authority.trusted_by(), secret_of(name) if name else None)
        return access.channel(self.address, [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)])

    def revoke(self) -> None:
        """Removes the token `revoked` from the file."""
        write_tokens(self.tokens, [entry for entry in TOKENS if entry["name"] != "revoked"])

    def try_revoked(self) -> str:
        """Makes a call with the revoked token over a new connection: "accepted", "refused" or "no answer"."""
        try:
            with self.connect("revoked", deadline_seconds=5) as client:
                client.get_pool(TENANTS[0])
        except UnauthenticatedError:
            return "refused"
        except KvpoolError:
            return "no answer"
        return "accepted"

    def errors(self) -> list[dict[str, str]]:
        """The logged records of severity ERROR and above."""
        return self.errors_of(self.server)

    @staticmethod
    def errors_of(process: LoggingProcess) -> list[dict[str, str]]:
        """The same of a process that logs JSON; other lines, which libraries write, count as errors."""
        lines = process.earlier_lines + process.lines
        records = [json.loads(line) if line.startswith("{") else {"level": "ERROR", "message": line} for line in lines]
        return [record for record in records if record["level"] in ("ERROR", "CRITICAL")]

    def close(self) -> None:
        """Kills the server."""
        self.server.kill()

    def access(self, name: str) -> dict[str, str]:
        """Variables of a process that has the token of that name."""
        return {"KVPOOL_TLS_CA": str(self.authority.path), "KVPOOL_TOKEN": secret_of(name)}


class Tenant:
    """A scheduler in its own process, which creates a pool, keeps a session open and times its steps.

    Attributes:
        rounds: Start (`time.monotonic`) and duration of each round in seconds; known after `stop`.
        error: The error that ended its work; empty if there was none.
    """

    def __init__(self, target: Target, name: str) -> None:
        self.rounds: list[tuple[float, float]] = []
        self.error = ""
        self._process = processes.start(
            [processes.PYTHON, str(Path(__file__).with_name("tenant.py")), target.address, name],
            stdin=processes.PIPE,
            stdout=processes.PIPE,
            env=processes.environment(**target.access(name)),
            text=True,
        )
        assert self._process.stdout
        assert self._process.stdout.readline() == "working\n"

    def stop(self) -> None:
        """Ends its work and reads the results."""
        output, _ = self._process.communicate(timeout=DEADLINE_SECONDS)
        result = json.loads(output.splitlines()[-1])
        self.rounds, self.error = result["rounds"], result["error"]


class Operator:
    """Creates and removes a pool again and again, so that the journal's file of pools is rewritten."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._client, self._admin = target.connect("operator"), target.admin()
        self.count = 0

    def change(self) -> None:
        """Creates and removes one pool."""
        self.count += 1
        name = f"churn-{self.count % _CHANGED_POOLS}"
        self._client.create_pool(pool_config(name, 16))
        self._admin.remove_pool(name)

    def close(self) -> None:
        """Closes both clients."""
        self._client.close()
        self._admin.close()
