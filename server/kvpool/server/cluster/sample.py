"""Copies the figures of a server's part in its shard."""

import time

from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.metrics.cluster_metrics import ShardSample


def sample_shard(member: ShardMember) -> ShardSample:
    """Copies the figures of a moment; called on the event loop."""
    replica, replicator = member.replica, member.replicator
    standbys = replica.standbys.connected.values()
    now_seconds = time.monotonic()
    num_in_sync, is_primary = len(replica.in_sync), replica.role is Role.PRIMARY
    return ShardSample(
        shard=member.name,
        role=replica.role.value,
        term=replica.known_term,
        in_sync_servers=num_in_sync,
        is_alone=is_primary and num_in_sync <= 1,
        standbys_missing=replica.num_missing if is_primary else 0,
        takeovers=member.num_takeovers,
        standbys_connected=len(standbys),
        lag_positions=max((replica.last_position - standby.acknowledged for standby in standbys), default=0),
        lag_seconds=max((standby.lag_seconds(now_seconds) for standby in standbys), default=0.0),
        confirm_seconds=member.gate.waits.copy(),
        records=replicator.num_records,
        sent_bytes=replicator.num_sent_bytes,
        is_directory_up=not member.directory_client.error,
        lost_states=replica.num_lost_states,
        differences=member.client.num_differences,
    )
