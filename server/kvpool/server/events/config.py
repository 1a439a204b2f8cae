"""Settings of the ZeroMQ publisher of block events, checked when they are made."""

import importlib.util
import socket
import string
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvpool.core.ids import PoolName

_PLACEHOLDERS: Final = ("pool", "host")
_PACKAGES: Final = {"zmq": "pyzmq", "msgspec": "msgspec"}


class ReplayFraming(StrEnum):
    """Frames of a replayed batch: with its topic, as in vLLM 0.26 and later, or without."""

    TOPIC = "topic"
    LEGACY = "legacy"


class HashForm(StrEnum):
    """Encoding of a block hash: its last 8 bytes as an unsigned integer, or all its bytes."""

    INTEGER = "integer"
    BYTES = "bytes"


class RemovedForm(StrEnum):
    """When BlockRemoved is published for a hash: for the last block that has it or, as in vLLM, for every block."""

    LAST_COPY = "last-copy"
    EVERY_COPY = "every-copy"


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """Settings of the publisher.

    Attributes:
        endpoint: Endpoint of the first pool, `tcp://` or `ipc://`. Empty: nothing is published. An endpoint with `*` or
            `::`, or of ipc, is bound; any other is connected to.
        replay_endpoint: Endpoint for replay and snapshot requests, always bound. Empty: none.
        pools: The pools to publish, in the order of their endpoints. Empty: all with events, in order of creation.
        topic: Topic of a pool's messages; `{pool}` and `{host}` are replaced.
        replay_framing: Frames of a replayed batch.
        hashes: Encoding of a block hash.
        removed: When a hash is published as removed.
        buffer_batches: Newest batches kept for replay, and the most queued for one slow subscriber.
        heartbeat_seconds: Seconds without events after which an empty batch is published; 0 for never.
    """

    endpoint: str = ""
    replay_endpoint: str = ""
    pools: tuple[str, ...] = ()
    topic: str = "kv@{pool}@{pool}"
    replay_framing: ReplayFraming = ReplayFraming.TOPIC
    hashes: HashForm = HashForm.INTEGER
    removed: RemovedForm = RemovedForm.LAST_COPY
    buffer_batches: int = 10_000
    heartbeat_seconds: float = 10.0

    def __post_init__(self) -> None:
        try:
            placeholders = {name for _, name, _, _ in string.Formatter().parse(self.topic) if name is not None}
        except ValueError as error:
            raise ValueError(f"events_topic: {self.topic!r}: {error}") from None
        if not placeholders <= set(_PLACEHOLDERS):
            raise ValueError(f"events_topic: {self.topic!r}: only {{pool}} and {{host}} can be replaced")
        if not 1 <= self.buffer_batches <= 10_000_000:  # noqa: PLR2004 - the message states it
            raise ValueError(f"events_buffer_batches: {self.buffer_batches} is not in [1, 10000000]")
        if self.heartbeat_seconds and not 0.1 <= self.heartbeat_seconds <= 3600:  # noqa: PLR2004 - the message states it
            raise ValueError(f"events_heartbeat_seconds: {self.heartbeat_seconds} is neither 0 nor in [0.1, 3600]")
        if len(set(self.pools)) < len(self.pools):
            raise ValueError("events_pool: a pool is named twice")
        if self.endpoint:
            _check_endpoint("events_endpoint", self.endpoint)
            _check_installed()
        if self.replay_endpoint:
            _check_endpoint("events_replay_endpoint", self.replay_endpoint)
            if not self.endpoint:
                raise ValueError("events_replay_endpoint: needs events_endpoint")
            if self.replay_endpoint == self.endpoint:
                raise ValueError("events_replay_endpoint: must differ from events_endpoint")

    def num_sockets(self, max_pools: int) -> int:
        """Maximum number of sockets of all published pools together.

        Args:
            max_pools: Maximum number of pools.
        """
        return bool(self.endpoint) * (1 + bool(self.replay_endpoint)) * (len(self.pools) or max_pools)

    def topic_of(self, pool: PoolName) -> str:
        """The topic of a pool's messages."""
        return self.topic.format(pool=pool, host=socket.gethostname())

    def number_of(self, pool: PoolName, num_published: int) -> int | None:
        """Index of a pool's endpoint, from 0; None if the pool is not to be published.

        Args:
            pool: A pool that is not published yet.
            num_published: Number of pools published so far.
        """
        if not self.pools:
            return num_published
        return self.pools.index(pool) if pool in self.pools else None


def is_bound(endpoint: str) -> bool:
    """Whether a publisher binds an endpoint rather than connecting to it. The rule is vLLM's."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def numbered(endpoint: str, number: int) -> str:
    """Endpoint of the pool with this index: the next TCP port, as for ranks of vLLM, or a suffix for ipc."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{number}" if number else endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + number}" if port.isdigit() and int(port) else endpoint


def _check_endpoint(name: str, endpoint: str) -> None:
    if endpoint.startswith("ipc://"):
        if not endpoint.removeprefix("ipc://"):
            raise ValueError(f"{name}: {endpoint!r}: needs ipc://PATH")
        return
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_port = port == "*" or (port.isdigit() and int(port) <= 65535)  # noqa: PLR2004 - the largest port
    if not endpoint.startswith("tcp://") or not colon or not host or not is_port:
        raise ValueError(f"{name}: {endpoint!r}: needs tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")
    if host == "0.0.0.0":  # noqa: S104 - refused because it would be connected to
        raise ValueError(f"{name}: {endpoint!r}: to listen on all addresses, use tcp://*:{port}")


def _check_installed() -> None:
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        needed = " and ".join(missing)
        raise ValueError(f"events_endpoint: publishing needs {needed}: install kvpool with its extra 'events'")
