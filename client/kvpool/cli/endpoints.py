"""The endpoints of a worker: metrics and health."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self, TypeVar

import click

from kvpool.cli.options import usage_errors
from kvpool.gpu_worker.status import WorkerStatus
from kvpool.gpu_worker.worker_health import health_served
from kvpool.gpu_worker.worker_metrics import WorkerCollector, metrics_served
from kvpool.wire.address import check_address, host_and_port, refuse_plaintext

_METRICS, _HEALTH = "--metrics-listen", "--health-listen"

_log = logging.getLogger("kvpool.worker")

_BoundT = TypeVar("_BoundT")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of the endpoints; None for an endpoint that is off."""

    metrics: str | None
    health: str | None

    @classmethod
    def parse(cls, metrics: str | None, health: str | None, allowed_plaintext: Collection[str] = ()) -> Self:
        """Checks the addresses.

        Args:
            metrics: `host:port`.
            health: `host:port` or `unix:/path`.
            allowed_plaintext: Names of the endpoints that other machines may reach without TLS.

        Raises:
            click.UsageError: An address is refused; the message names the flag.
        """
        if metrics is not None:
            with usage_errors():
                host_and_port(_METRICS, metrics)
                refuse_plaintext(_METRICS, "metrics", metrics, allowed_plaintext)
        if health is not None:
            with usage_errors(f"{_HEALTH}: "):
                check_address(health)
            with usage_errors():
                refuse_plaintext(_HEALTH, "health", health, allowed_plaintext)
        return cls(metrics, health)

    @contextmanager
    def health_served(self) -> Iterator[Callable[[WorkerStatus], None]]:
        """Serves health checks if enabled; yields a function to call with each new status of the rank."""
        if self.health is None:
            yield lambda _: None
            return
        with _named(_HEALTH, self.health, health_served(self.health)) as (address, on_status):
            _log.info("health listening", extra={"address": address})
            yield on_status

    @contextmanager
    def metrics_served(self, collector: WorkerCollector) -> Iterator[None]:
        """Serves metrics if enabled."""
        if self.metrics is None:
            yield
            return
        host, port = host_and_port(_METRICS, self.metrics)
        with _named(_METRICS, self.metrics, metrics_served(collector, host, port)) as bound_port:
            _log.info("metrics listening", extra={"address": f"{self.metrics.rpartition(':')[0]}:{bound_port}"})
            yield


@contextmanager
def _named(flag: str, address: str, server: AbstractContextManager[_BoundT]) -> Iterator[_BoundT]:
    """Enters `server`; an error names the flag of the address."""
    with ExitStack() as stack:
        try:
            bound = stack.enter_context(server)
        except OSError as error:
            raise click.ClickException(f"{flag}: cannot listen on {address}: {error.strerror or error}") from error
        yield bound
