"""A real `kvpool serve` with TLS, tokens, a journal, metrics and block events, and the tenants that work on it."""

import json
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Final

from kvpool.client import Client, KvpoolError, UnauthenticatedError, connect
from kvpool.client.admin import AdminClient
from support import processes
from support.auth import Authority, Entry, secret_of, write_tokens
from support.server import CommandLineServer, free_port, pool_config
from support.waiting import DEADLINE_SECONDS, wait_until

TENANTS: Final = ("tenant-0", "tenant-1")
TOKENS: Final[list[Entry]] = [
    *({"name": name, "role": "scheduler", "pools": ["*"]} for name in (*TENANTS, "attacker", "revoked")),
    {"name": "operator", "role": "admin", "pools": ["*"]},
]
MAX_POOLS: Final = 8


class Target:
    """The server and its files.

    Args:
        folder: Empty folder for the files.
        prefix: What to put before the server's command, for example to limit its resources.
        stderr: Where the server logs.

    Attributes:
        folder: Folder of all files.
        journal: Folder of the journal.
        tokens: The token file.
        server: The server.
        port: Port of the calls.
        metrics_port: Port of the metrics.
        events_port: Port of the block events of the first pool.
    """

    def __init__(self, folder: Path, prefix: Sequence[str] = (), stderr: int = processes.PIPE) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.tokens = folder / "tokens.toml"
        self.port, self.metrics_port, self.events_port = free_port(), free_port(), free_port()
        self._authority = Authority(folder, "ca")
        self._certificate = self._authority.issue("localhost")
        write_tokens(self.tokens, TOKENS)
        options: list[object] = ["--metrics-listen", f"127.0.0.1:{self.metrics_port}", "--log-format", "json"]
        options += ["--tls-cert", self._certificate.cert, "--tls-key", self._certificate.key]
        options += ["--tokens", self.tokens, "--journal", self.journal, "--max-pools", MAX_POOLS]
        options += ["--events-endpoint", f"tcp://*:{self.events_port}", "--allow-plaintext", "events"]
        self.server = CommandLineServer(self.address, options=options, prefix=prefix, stderr=stderr, waits=False)
        wait_until(lambda: not self.server.is_alive or self.is_ready(), "the server is ready")
        assert self.server.is_alive, self.server.log

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
        tls = self._authority.trusted_by()
        return connect(self.address, tls=tls, token=secret_of(name), deadline_seconds=deadline_seconds)

    def admin(self) -> AdminClient:
        """An operator's client."""
        tls = self._authority.trusted_by()
        return AdminClient(self.address, tls=tls, token=secret_of("operator"), deadline_seconds=60.0)

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

    def errors(self) -> list[str]:
        """The logged records of severity ERROR and above."""
        lines = self.server.earlier_lines + self.server.lines
        return [line for line in lines if json.loads(line)["level"] in ("ERROR", "CRITICAL")]

    def close(self) -> None:
        """Kills the server."""
        self.server.kill()

    def access(self, name: str) -> dict[str, str]:
        """Variables of a process that has the token of that name."""
        return {"KVPOOL_TLS_CA": str(self._authority.path), "KVPOOL_TOKEN": secret_of(name)}


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
        self._client, self._admin = target.connect("operator"), target.admin()
        self.count = 0

    def change(self) -> None:
        """Creates and removes one pool."""
        self.count += 1
        name = f"churn-{self.count}"
        self._client.create_pool(pool_config(name, 16))
        self._admin.remove_pool(name)

    def close(self) -> None:
        """Closes both clients."""
        self._client.close()
        self._admin.close()
