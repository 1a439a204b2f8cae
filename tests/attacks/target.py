"""A real `kvpool serve` with TLS, tokens, a journal, metrics and block events, and the tenants that work on it."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import IO, Final

from kvpool.client import Client, KvpoolError, UnauthenticatedError, connect
from kvpool.client.admin import AdminClient
from support.auth import Authority, Entry, secret_of, write_tokens
from support.server import free_port, pool_config
from support.wire_ranks import wait_until

TENANTS: Final = ("tenant-0", "tenant-1")
TOKENS: Final[list[Entry]] = [
    *({"name": name, "role": "scheduler", "pools": ["*"]} for name in (*TENANTS, "attacker", "revoked")),
    {"name": "operator", "role": "admin", "pools": ["*"]},
]
MAX_POOLS: Final = 8
_TESTS: Final = Path(__file__).parents[1]
_KVPOOL: Final = str(Path(sys.executable).parent / "kvpool")
_PATH: Final = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))


class Target:
    """The server and its files.

    Args:
        folder: Empty folder for the files.
        prepare: Called in the server's process before it starts, for example to limit its resources.
        stderr: Where the server logs; None for a file.

    Attributes:
        folder: Folder of all files.
        journal: Folder of the journal.
        tokens: The token file.
        process: The server's process.
        port: Port of the calls.
        metrics_port: Port of the metrics.
        events_port: Port of the block events of the first pool.
    """

    def __init__(
        self, folder: Path, prepare: Callable[[], None] | None = None, stderr: IO[bytes] | int | None = None
    ) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.tokens = folder / "tokens.toml"
        self.port, self.metrics_port, self.events_port = free_port(), free_port(), free_port()
        self._authority = Authority(folder, "ca")
        self._certificate = self._authority.issue("localhost")
        self._prepare, self._stderr = prepare, stderr
        self._log = folder / "log.json"
        self._log.touch()
        write_tokens(self.tokens, TOKENS)
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [_KVPOOL, "serve", "--listen", self.address, "--metrics-listen", f"127.0.0.1:{self.metrics_port}"]
        command += ["--tls-cert", str(self._certificate.cert), "--tls-key", str(self._certificate.key)]
        command += ["--tokens", str(self.tokens), "--journal", str(self.journal), "--log-format", "json"]
        command += ["--events-endpoint", f"tcp://*:{self.events_port}", "--allow-plaintext", "events"]
        command += ["--max-pools", str(MAX_POOLS)]
        with self._log.open("ab") as log:
            stderr = log if self._stderr is None else self._stderr
            process = subprocess.Popen(command, stderr=stderr, preexec_fn=self._prepare)  # noqa: PLW1509 - no threads yet
        wait_until(lambda: process.poll() is not None or self.is_ready(), "the server is ready")
        assert process.poll() is None, self._log.read_text()
        return process

    @property
    def address(self) -> str:
        """Address of the calls."""
        return f"localhost:{self.port}"

    def restart(self) -> None:
        """Kills the server and starts another."""
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def is_ready(self) -> bool:
        """Whether `/readyz` answers with success."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/readyz", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def is_journal_up(self) -> bool:
        """The metric of the journal. False if the server does not answer, for example because it is busy."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
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
        """The logged records of severity ERROR and above. The last line may be incomplete."""
        lines = self._log.read_text().split("\n")[:-1]
        return [line for line in lines if json.loads(line)["level"] in ("ERROR", "CRITICAL")]

    def close(self) -> None:
        """Stops the server."""
        self.process.kill()
        self.process.wait()

    def environment(self, name: str) -> dict[str, str]:
        """Environment of a process that has the token of that name."""
        access = {"KVPOOL_TLS_CA": str(self._authority.path), "KVPOOL_TOKEN": secret_of(name)}
        return {**os.environ, **access, "PYTHONPATH": _PATH}


class Tenant:
    """A scheduler in its own process, which creates a pool, keeps a session open and times its steps.

    Attributes:
        rounds: Start (`time.monotonic`) and duration of each round in seconds; known after `stop`.
        error: The error that ended its work; empty if there was none.
    """

    def __init__(self, target: Target, name: str) -> None:
        self.rounds: list[tuple[float, float]] = []
        self.error = ""
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("tenant.py")), target.address, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=target.environment(name),
            text=True,
        )
        assert self._process.stdout
        assert self._process.stdout.readline() == "working\n"

    def stop(self) -> None:
        """Ends its work and reads the results."""
        output, _ = self._process.communicate(timeout=90)
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
