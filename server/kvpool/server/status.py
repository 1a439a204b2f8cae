"""What a server shows of itself on its metrics port: its figures, the status page, and whether it is ready."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import Metric

from kvpool.core.ids import PoolName
from kvpool.server.auth.certificates import Certificates
from kvpool.server.auth.token_file import TokenFile
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.cluster.shard_metrics import shard_metrics
from kvpool.server.http.collector import StatusCollector
from kvpool.server.http.pages import StatusPages
from kvpool.server.journal.journal import Journal
from kvpool.server.limit_usage import limit_usage
from kvpool.server.metrics.observations import Observations
from kvpool.server.metrics.pool_metrics import PoolSample, copy_histograms
from kvpool.server.metrics.server_metrics import LoopCollector, awaited_from, on_loop, sampler, server_metrics
from kvpool.server.services.components import Components
from kvpool.v1.admin_pb2 import ServerInfo
from kvpool.wire.address import host_and_port
from kvpool.wire.http_server import HttpServer
from kvpool.wire.metrics_pages import MetricsPages, Readiness

_log = logging.getLogger("kvpool.server")


class Status:
    """The state of one server, for people and programs that watch it.

    Args:
        parts: The parts of the server.
        observations: Figures counted by the services.
        tokens: The token file; None without tokens.
        certificates: The server's certificates; None without TLS.
        journal: The journal; None without one.
        shard: The server's shard; None without a cluster.
        server_info: Describes the server.

    Attributes:
        is_started: Whether the server listens.
        collector: Copies what the status page shows.
    """

    def __init__(  # noqa: PLR0913 - the parts that have a state
        self,
        parts: Components,
        observations: Observations,
        *,
        tokens: TokenFile | None,
        certificates: Certificates | None,
        journal: Journal | None,
        shard: ShardMember | None,
        server_info: Callable[[], ServerInfo],
    ) -> None:
        self.is_started = False
        self._parts = parts
        self._observations = observations
        files = (("tokens", tokens), ("certificates", certificates))
        self._credentials = {kind: each for kind, each in files if each}
        self._journal = journal
        self._shard = shard
        self.collector = StatusCollector(parts, shard, self.readiness, server_info)

    def serve(self) -> HttpServer:
        """Serves it at the configured address.

        Raises:
            OSError: The address cannot be bound.
        """
        config = self._parts.config.metrics
        sample = sampler(self._sample_pools, self._observations, self._other_metrics, with_vllm=config.vllm_names)
        host, port = host_and_port("metrics_listen", config.address)
        loop = asyncio.get_running_loop()
        try:
            pages = MetricsPages(LoopCollector(loop, sample), lambda: on_loop(loop, self.readiness))
            status_pages = StatusPages(lambda: awaited_from(loop, self.collector.copy))
            server = HttpServer(host, port, {**pages.handlers, **status_pages.handlers})
        except OSError as error:
            raise OSError(f"cannot serve metrics on {config.address}: {error.strerror}") from error
        _log.info("metrics listening", extra={"address": f"{host}:{server.port}"})
        return server

    def readiness(self) -> Readiness:
        """Whether the server can be used, and why not."""
        parts = self._parts
        if parts.shutdown.is_about_to_stop:
            return Readiness(is_ready=False, detail="the server is stopping")
        if None in parts.state.pools.drained:
            return Readiness(is_ready=False, detail="the server is drained")
        if self._shard and (refusal := self._shard.refusal()):
            return Readiness(is_ready=self._shard.replica.is_following, detail=f"standby: {refusal}")
        if not self.is_started:
            return Readiness(is_ready=False, detail="the server is starting")
        error = self._journal.error if self._journal else ""
        return Readiness(is_ready=True, detail=f"the journal is down: {error}" if error else "")

    def _sample_pools(self) -> list[PoolSample]:
        if self._is_standby():  # the primary reports them
            return []
        return [self._sample_pool(name) for name in self._parts.pools.names()]

    def _sample_pool(self, name: PoolName) -> PoolSample:
        parts = self._parts
        pool = parts.state.pools.get(name) if name in parts.state.pools else None
        return PoolSample(
            parts.pools.figures(name, max_processes=0),
            copy_histograms(pool.block_lifetimes if pool else None, self._observations.steps.get(name)),
            pool.hit_curve.changed_tokens if pool and pool.hit_curve else {},
        )

    def _other_metrics(self, pools: Sequence[PoolSample]) -> Iterator[Metric]:
        infos = [pool.info for pool in pools]
        journal = self._journal.counts if self._journal else None
        usage = limit_usage(self._parts, infos, journal, serves=not self._is_standby())
        yield from server_metrics(self._credentials, usage, journal)
        if self._shard:
            yield from shard_metrics(self._shard)

    def _is_standby(self) -> bool:
        return self._shard is not None and self._shard.refusal() is not None
