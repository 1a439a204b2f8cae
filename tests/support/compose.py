"""The Compose stack of deploy/ in real containers, and helpers to control and query it."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from google.protobuf import json_format

from kvpool.client import Client, KvpoolError, PoolInfo, PoolState, connect
from support.paths import ROOT
from support.prometheus import Prometheus
from support.server import free_port

DEPLOY: Final = ROOT / "deploy"
PROJECT: Final = "kvpool-test"
POOL: Final = "demo"
SCHEDULERS: Final = ("scheduler-0", "scheduler-1")
WORKERS: Final = ("worker-0", "worker-1")
SERVED: Final = ("server", *WORKERS, "prometheus")
"""Services with a health check."""

_PATIENT: Final = ROOT / "tests" / "compose" / "patient.yml"
"""Settings for a busy machine."""
_POLL_SECONDS: Final = 0.1
_PORTS: Final = ("KVPOOL_PORT", "KVPOOL_STEPS_PORT", "KVPOOL_METRICS_PORT", "PROMETHEUS_PORT")

_T = TypeVar("_T")


def eventually(what: str, look: Callable[[], _T | None], timeout_seconds: float = 60.0) -> _T:
    """Polls until a function returns a true value; an unreachable server counts as false."""
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            seen, reason = look(), "nothing to see"
        except KvpoolError as error:
            seen, reason = None, str(error)
        if seen:
            return seen
        assert time.monotonic() < end, f"{what}: not within {timeout_seconds:g} s ({reason})"
        time.sleep(_POLL_SECONDS)


def prometheus_image() -> str:
    """The image that the stack uses."""
    default = re.search(r"PROMETHEUS_IMAGE:-([^}]*)", (DEPLOY / "docker-compose.yml").read_text())
    assert default
    return os.environ.get("PROMETHEUS_IMAGE", default[1])


def docker(*arguments: str, timeout_seconds: float = 120.0) -> str:
    """Runs docker; returns what it wrote to stdout."""
    return _run(["docker", *arguments], os.environ, timeout_seconds)


@dataclass(slots=True)
class Failure:
    """A failure injected into the stack, and its timing.

    Attributes:
        what: What was done.
        noticed_seconds: Until the pool said that something was wrong; None if it is never to.
        recovered_seconds: Until all was well again, from the moment when what was missing came back.
        cost: What it cost.
    """

    what: str
    noticed_seconds: float | None = None
    recovered_seconds: float | None = None
    cost: str = ""
    _since: float = field(default_factory=time.monotonic)

    def noticed(self) -> None:
        """Records that the failure is visible."""
        self.noticed_seconds = time.monotonic() - self._since

    def repaired(self) -> None:
        """Records that the missing part is about to return: the recovery time starts here."""
        self._since = time.monotonic()

    def recovered(self, cost: str) -> None:
        """Records that the stack has recovered."""
        self.recovered_seconds = time.monotonic() - self._since
        self.cost = cost


Inject: TypeAlias = Callable[[str], Failure]
"""Begins a failure."""


class Stack:
    """The stack, with its own project name and ports.

    Attributes:
        address: The server's published port.
        client: Connected to it.
        prometheus: Prometheus' API.
    """

    def __init__(self) -> None:
        ports = {name: str(free_port()) for name in _PORTS}
        self._environment = {**os.environ, **ports}
        self._command = [*_compose(), "-p", PROJECT, "-f", str(DEPLOY / "docker-compose.yml"), "-f", str(_PATIENT)]
        self.address = f"127.0.0.1:{ports['KVPOOL_PORT']}"
        self.client: Client = connect(self.address, deadline_seconds=2.0)
        self.prometheus = Prometheus(f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}")

    def compose(self, *arguments: str, timeout_seconds: float = 120.0) -> str:
        """Runs Compose; returns what it wrote to stdout."""
        return _run([*self._command, *arguments], self._environment, timeout_seconds)

    def up(self) -> None:
        """Builds the images, starts all services, and waits until they are healthy and the schedulers work."""
        self.compose("build", timeout_seconds=840)
        self.compose("up", "-d", "--no-build")
        self.wait_at_work()

    @contextlib.contextmanager
    def settings(self, **variables: str) -> Iterator[None]:
        """Sets variables of the Compose file for the commands within."""
        before = self._environment
        self._environment = {**before, **variables}
        try:
            yield
        finally:
            self._environment = before

    def down(self) -> None:
        """Removes all containers and volumes."""
        self.client.close()
        self.compose("down", "-v", "--remove-orphans")

    def container(self, service: str) -> str:
        """The id of a service's container."""
        return self.compose("ps", "-q", service).strip()

    def health(self, service: str) -> str:
        """Status of the container's health check."""
        return docker("inspect", "--format", "{{.State.Health.Status}}", self.container(service)).strip()

    def wait_healthy(self) -> None:
        """Waits until all services with a health check are healthy."""
        wanted = dict.fromkeys(SERVED, "healthy")
        eventually("all healthy", lambda: {service: self.health(service) for service in SERVED} == wanted, 120)

    def wait_at_work(self) -> None:
        """Waits until all services are healthy, the pool is ready, and both schedulers work."""
        self.wait_healthy()
        self.wait_ready()
        self.wait_played_on()

    def wait_scraped(self) -> None:
        """Waits until Prometheus has scraped the server's current state."""
        now = time.time()
        eventually("a scrape", lambda: self.prometheus.scraped_after(now, f'kvpool_pool_epoch{{pool="{POOL}"}}'))

    def logs(self, *services: str) -> str:
        """Output of services."""
        return self.compose("logs", "--no-color", *services)

    def pool(self) -> PoolInfo:
        """The current pool info of the server."""
        return self.client.get_pool(POOL)

    def local_pool(self, server: str) -> PoolInfo:
        """The one pool of a server that listens only on a socket in a volume."""
        profile = server.partition("-")[0]
        show = ("kvpool", "pools", "--json", "--address", "unix:/run/kvpool/server.sock")
        (pool,) = json.loads(self.compose("--profile", profile, "exec", "-T", server, *show))["pools"]
        return json_format.ParseDict(pool, PoolInfo())

    def wait_state(self, state: PoolState.ValueType, timeout_seconds: float = 60.0) -> PoolInfo:
        """Waits for a state of the pool."""

        def look() -> PoolInfo | None:
            pool = self.pool()
            return pool if pool.state == state else None

        return eventually(f"pool {PoolState.Name(state)}", look, timeout_seconds)

    def wait_ready(self) -> PoolInfo:
        """Waits until the pool is ready."""
        return self.wait_state(PoolState.POOL_STATE_READY, 90)

    def wait_played_on(self) -> PoolInfo:
        """Waits until both schedulers have a session and allocate blocks: the number of look-ups increases."""
        begin = eventually("two sessions", lambda: pool if (pool := self.pool()).sessions == len(SCHEDULERS) else None)

        def look() -> PoolInfo | None:
            pool = self.pool()
            return pool if pool.prefix_cache.requests >= begin.prefix_cache.requests + 10 else None

        return eventually("the schedulers to play", look)

    def stop_schedulers(self) -> PoolInfo:
        """Stops the schedulers, and waits until no session holds blocks."""
        self.compose("stop", *SCHEDULERS)
        return eventually("an idle pool", lambda: None if (pool := self.pool()).sessions or pool.requests else pool)

    def assert_no_block_lost(self) -> None:
        """Checks that all blocks are free while the schedulers are stopped; then starts the schedulers again."""
        pool = self.stop_schedulers()
        assert pool.state == PoolState.POOL_STATE_READY
        assert pool.free_blocks == pool.config.num_blocks - 1, "blocks were lost"
        self.compose("start", *SCHEDULERS)
        self.wait_played_on()


def _compose() -> list[str]:
    """The Compose command: a plugin of docker since version 2, a separate program in 1.29."""
    if (
        shutil.which("docker")
        and not subprocess.run(
            ["docker", "compose", "version"],  # noqa: S607 - as a person would
            capture_output=True,
            check=False,
        ).returncode
    ):
        return ["docker", "compose"]
    return ["docker-compose"]


def _run(command: list[str], environment: Mapping[str, str], timeout_seconds: float) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout_seconds, env=dict(environment)
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
