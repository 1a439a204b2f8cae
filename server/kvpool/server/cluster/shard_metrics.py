"""Prometheus metrics of a server's part in its shard. Made on the event loop, as they are few."""

import time
from collections.abc import Iterator
from typing import Final

from prometheus_client import Metric

from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.wire.metric_families import Row, families, family, histogram_family


def _is_alone(member: ShardMember) -> bool:
    return member.replica.role is Role.PRIMARY and len(member.replica.in_sync) <= 1


def _lag_positions(member: ShardMember) -> int:
    standbys = member.replica.standbys.connected.values()
    return max((member.replica.last_position - standby.acknowledged for standby in standbys), default=0)


def _lag_seconds(member: ShardMember) -> float:
    standbys, now_seconds = member.replica.standbys.connected.values(), time.monotonic()
    return max((standby.lag_seconds(now_seconds) for standby in standbys), default=0.0)


_SHARD: Final[dict[str, Row[ShardMember]]] = {
    "kvpool_shard_term": Row("Highest term of the shard that the server has seen.", "replica.known_term"),
    "kvpool_shard_in_sync_servers": Row(
        "Servers that have every acknowledged change, the primary included.", lambda member: len(member.replica.in_sync)
    ),
    "kvpool_shard_alone": Row("1 if the server is the primary and no standby could take over.", _is_alone),
    "kvpool_shard_standbys_missing": Row(
        "Standbys that the shard of this primary lacks to the wanted number.", "replica.num_missing"
    ),
    "kvpool_shard_takeovers_total": Row("Number of times that this process became the primary.", "num_takeovers"),
    "kvpool_shard_standbys_connected": Row(
        "Standbys that are connected to this server.", lambda member: len(member.replica.standbys.connected)
    ),
    "kvpool_shard_lag_positions": Row(
        "Changes and marks that the standby which is furthest behind has not acknowledged.", _lag_positions
    ),
    "kvpool_shard_lag_seconds": Row(
        "Age of the oldest change that a connected standby has not acknowledged, accurate to 0.1 s.", _lag_seconds
    ),
    "kvpool_shard_records_total": Row("Changes given to the standbys.", "replicator.num_records"),
    "kvpool_shard_sent_bytes_total": Row(
        "Bytes sent to the standbys, snapshots included.", "replicator.num_sent_bytes"
    ),
    "kvpool_shard_directory_up": Row(
        "1 if the directory could be used when the server used it last.",
        lambda member: not member.directory_client.error,
    ),
}


def shard_metrics(member: ShardMember) -> Iterator[Metric]:
    """Makes the metrics of a server of a shard."""
    name, role = member.name, member.replica.role
    yield family(
        "kvpool_shard_role",
        "1 for the server's current role in its shard, 0 for the others.",
        ("shard", "role"),
        [((name, each.value), each is role) for each in Role],
    )
    yield from families(_SHARD, ("shard",), [((name,), member)])
    lost = [("no_state", member.replica.num_lost_states), ("difference", member.client.num_differences)]
    yield family(
        "kvpool_shard_state_lost_total",
        "States that were lost, or that differed from the primary's.",
        ("shard", "reason"),
        [((name, reason), count) for reason, count in lost],
    )
    yield histogram_family(
        "kvpool_shard_confirm_seconds",
        "Time for which outputs waited for the standbys, those that were then refused included.",
        ("shard",),
        [((name,), member.gate.waits)],
    )
