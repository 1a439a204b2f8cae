"""Configuration of a server: parsed once at the entry point, then passed on."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final
from urllib.parse import urlsplit

from kvpool.core.errors import check_setting
from kvpool.core.ids import MAX_BLOCKS
from kvpool.core.ranks.messages import RankTiming
from kvpool.core.sessions.session import LeaseBounds
from kvpool.server.auth.config import AuthConfig
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.journal.config import JournalConfig
from kvpool.server.limits.config import DEFAULT_LIMITS, Limits
from kvpool.wire.address import DEFAULT_ADDRESS, check_address, host_and_port, refuse_plaintext

MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Settings of the Prometheus metrics.

    Attributes:
        address: Address of /metrics, `host:port` (port 0 for a free one); empty: metrics are not served.
        vllm_names: Whether metrics are also exported under vLLM's names.
        block_sample_rate: Fraction of blocks that is sampled for the metrics of block lifetimes, [0, 1]. Has no effect
            without an address.
    """

    address: str = ""
    vllm_names: bool = False
    block_sample_rate: float = 0.01

    def __post_init__(self) -> None:
        if self.address:
            host_and_port("metrics_listen", self.address)
        check_setting("block_sample_rate", self.block_sample_rate, 0, 1)


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Settings of the spans that are sent over OTLP.

    Attributes:
        endpoint: The collector, `http://HOST:PORT` or `https://HOST:PORT`; empty: nothing is traced.
        slow_seconds: Duration from which a call or a step has a span, [0, 3600].
    """

    endpoint: str = ""
    slow_seconds: float = 0.1

    def __post_init__(self) -> None:
        check_setting("trace_slow_seconds", self.slow_seconds, 0, 3600)
        if not self.endpoint:
            return
        url = urlsplit(self.endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            message = f"{self.endpoint!r}: needs http://HOST:PORT or https://HOST:PORT"
            raise ValueError(f"otlp_traces_endpoint: {message}")
        if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None:
            raise ValueError("otlp_traces_endpoint: tracing needs OpenTelemetry: install kvpool with its extra 'otel'")


_RANGES: Final = {
    "max_message_bytes": (64 * 1024, 1024 * MIB),
    "max_pool_blocks": (2, MAX_BLOCKS),
    "max_pools": (1, 2**20),
    "past_epoch": (0, 2**52),
    "grace_seconds": (0, 3600),
    "drain_seconds": (0, 86_400),
    "quarantine_seconds": (0, 3600),
    "dead_peer_seconds": (1, 3600),
}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A server's settings.

    Attributes:
        addresses: Addresses to listen on: `host:port` (port 0 for a free one) or `unix:/path`.
        steps_listen: Addresses that take steps as frames; empty: one beside each of `addresses`, `PATH.steps` or the
            next port.
        max_message_bytes: Maximum size of a received message.
        max_pool_blocks: Maximum number of blocks of one pool; each that was used takes about 65 bytes
            of the server's memory, and 225 while it is cached.
        grace_seconds: Time that a stopping server gives calls in flight.
        drain_seconds: Time that a server gives open sessions after a signal to stop.
        quarantine_seconds: Time until the blocks of a session that was ended are free, in pools without ranks or with
            a rank that does not fence. 0: they are free at once. For the same time after a start with lost sessions,
            no session is opened in these pools.
        dead_peer_seconds: Time after which an unresponsive connection counts as broken.
        rank_timing: Heartbeat interval and timeouts of ranks.
        max_pools: Maximum number of pools.
        metrics: Prometheus metrics.
        tracing: Spans of admissions and slow calls.
        limits: Limits on clients.
        past_epoch: Newest epoch that an earlier server may have used, if there is no journal. The first epoch of each
            pool is higher.
        leases: Bounds of the sessions' leases.
        journal: Journal of changes, from which a killed server recovers.
        auth: Certificates, tokens, and what may be served without encryption.
        cluster: The shard that this server shares with standbys.
    """

    addresses: tuple[str, ...] = (DEFAULT_ADDRESS,)
    steps_listen: tuple[str, ...] = ()
    max_message_bytes: int = 16 * MIB
    max_pool_blocks: int = 2**24
    grace_seconds: float = 10.0
    drain_seconds: float = 0.0
    quarantine_seconds: float = 5.0
    dead_peer_seconds: float = 10.0
    rank_timing: RankTiming = RankTiming()  # noqa: RUF009 - frozen
    max_pools: int = 256
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()
    limits: Limits = DEFAULT_LIMITS
    past_epoch: int = 0
    leases: LeaseBounds = LeaseBounds()  # noqa: RUF009 - frozen
    journal: JournalConfig = JournalConfig()  # noqa: RUF009 - frozen
    auth: AuthConfig = AuthConfig()  # noqa: RUF009 - frozen
    cluster: ClusterConfig = ClusterConfig()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("listen: at least one address is needed")
        for name, addresses in (("listen", self.addresses), ("steps_listen", self.steps_listen)):
            for address in addresses:
                try:
                    check_address(address)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
        for name, bounds in _RANGES.items():
            check_setting(name, getattr(self, name), *bounds)
        if self.limits.max_waiting_bytes < self.max_message_bytes:
            raise ValueError(f"max_waiting_bytes: must be at least max_message_bytes, {self.max_message_bytes}")
        if self.cluster.url and not self.journal.folder:
            raise ValueError("journal: a server of a cluster needs a folder, in which it keeps its identity")
        if self.cluster.url and self.cluster.confirm_seconds >= self.limits.stall_seconds:
            raise ValueError(f"confirm_seconds: must be less than stall_seconds, {self.limits.stall_seconds:g}")
        self._refuse_plaintext()

    def _refuse_plaintext(self) -> None:
        endpoints = [
            ("metrics_listen", "metrics", self.metrics.address),
            ("replication_listen", "replication", "" if self.auth.tls_cert else self.cluster.replication_listen),
            *(("listen", "grpc", address) for address in self.addresses if not self.auth.tls_cert),
            *(("steps_listen", "grpc", address) for address in self.steps_listen if not self.auth.tls_cert),
        ]
        for name, kind, address in endpoints:
            if address:
                refuse_plaintext(name, kind, address, self.auth.allow_plaintext)
