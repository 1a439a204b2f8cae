"""Prometheus metrics of a server's part in its shard."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import Metric

from kvpool.core.statistics import Histogram
from kvpool.server.metrics.families import Row, families, family, histogram_family

ROLES: Final = ("starting", "standby", "candidate", "primary", "deposed")


@dataclass(frozen=True, slots=True)
class ShardSample:
    """The figures of a moment. Counts are of this process.

    Attributes:
        shard: `CLUSTER/SHARD`.
        role: One of `ROLES`.
        term: Highest term that the server has seen.
        in_sync_servers: Servers that have every acknowledged change, the primary included, as far as it is known.
        is_alone: Whether this server is the primary, and no standby is in sync.
        standbys_missing: Standbys that the shard lacks, as its primary sees it; 0 of another server.
        takeovers: How often this process has become the primary.
        standbys_connected: Standbys connected to this server.
        lag_positions: Changes and marks that the standby which is furthest behind has not acknowledged.
        lag_seconds: Age of the oldest of them, accurate to 0.1 s.
        confirm_seconds: Durations of waits for the standbys.
        records: Changes given to the standbys.
        sent_bytes: Bytes sent to the standbys, snapshots included.
        is_directory_up: Whether the directory could be used when it was used last.
        lost_states: How often this process became the primary without the state of the last primary.
        differences: How often this process, as a standby, found that its state differed from the primary's.
    """

    shard: str
    role: str
    term: int
    in_sync_servers: int
    is_alone: bool
    standbys_missing: int
    takeovers: int
    standbys_connected: int
    lag_positions: int
    lag_seconds: float
    confirm_seconds: Histogram
    records: int
    sent_bytes: int
    is_directory_up: bool
    lost_states: int
    differences: int


_SHARD: Final[dict[str, Row[ShardSample]]] = {
    "kvpool_shard_term": Row("Highest term of the shard that the server has seen.", lambda shard: shard.term),
    "kvpool_shard_in_sync_servers": Row(
        "Servers that have every acknowledged change, the primary included.", lambda shard: shard.in_sync_servers
    ),
    "kvpool_shard_alone": Row(
        "1 if the server is the primary and no standby could take over.", lambda shard: shard.is_alone
    ),
    "kvpool_shard_standbys_missing": Row(
        "Standbys that the shard of this primary lacks to the wanted number.", lambda shard: shard.standbys_missing
    ),
    "kvpool_shard_takeovers_total": Row(
        "Number of times that this process became the primary.", lambda shard: shard.takeovers
    ),
    "kvpool_shard_standbys_connected": Row(
        "Standbys that are connected to this server.", lambda shard: shard.standbys_connected
    ),
    "kvpool_shard_lag_positions": Row(
        "Changes and marks that the standby which is furthest behind has not acknowledged.",
        lambda shard: shard.lag_positions,
    ),
    "kvpool_shard_lag_seconds": Row(
        "Age of the oldest change that a connected standby has not acknowledged, accurate to 0.1 s.",
        lambda shard: shard.lag_seconds,
    ),
    "kvpool_shard_records_total": Row("Changes given to the standbys.", lambda shard: shard.records),
    "kvpool_shard_sent_bytes_total": Row(
        "Bytes sent to the standbys, snapshots included.", lambda shard: shard.sent_bytes
    ),
    "kvpool_shard_directory_up": Row(
        "1 if the directory could be used when the server used it last.", lambda shard: shard.is_directory_up
    ),
}


def cluster_metrics(sample: ShardSample) -> Iterator[Metric]:
    """Makes the metrics of a server of a cluster."""
    name = sample.shard
    yield family(
        "kvpool_shard_role",
        "1 for the server's current role in its shard, 0 for the others.",
        ("shard", "role"),
        [((name, role), role == sample.role) for role in ROLES],
    )
    yield from families(_SHARD, ("shard",), [((name,), sample)])
    yield family(
        "kvpool_shard_state_lost_total",
        "States that were lost, or that differed from the primary's.",
        ("shard", "reason"),
        [((name, "no_state"), sample.lost_states), ((name, "difference"), sample.differences)],
    )
    yield histogram_family(
        "kvpool_shard_confirm_seconds",
        "Time for which outputs waited for the standbys, those that were then refused included.",
        ("shard",),
        [((name,), sample.confirm_seconds)],
    )
