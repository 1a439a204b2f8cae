"""Copies the figures of a server's part in its shard."""

import time

from kvpool.server.cluster.replica import Role
from kvpool.server.cluster.shard import Shard
from kvpool.server.metrics.cluster_metrics import ShardSample


def sample_shard(shard: Shard, num_conflicting_pools: int = 0) -> ShardSample:
    """Copies the figures of a moment; called on the event loop."""
    replica, shipper = shard.replica, shard.shipper
    links = shipper.links.values()
    last_position, now_seconds = shipper.log.last_position, time.monotonic()
    in_sync = replica.in_sync
    return ShardSample(
        shard=shard.name,
        role=replica.role.value,
        term=replica.known_term,
        in_sync_servers=len(in_sync),
        is_alone=replica.role is Role.PRIMARY and len(in_sync) <= 1,
        standbys_missing=shard.standbys.num_missing if replica.role is Role.PRIMARY else 0,
        takeovers=shard.num_takeovers,
        standbys_connected=len(links),
        lag_positions=max((last_position - link.acknowledged for link in links), default=0),
        lag_seconds=max((link.lag_seconds(now_seconds) for link in links), default=0.0),
        confirm_seconds=shard.gate.waits.copy(),
        records=shipper.num_records,
        sent_bytes=shipper.num_sent_bytes,
        is_directory_up=not shard.entry.error,
        lost_states=replica.num_lost_states,
        differences=shard.follower.num_differences,
        conflicting_pools=num_conflicting_pools,
    )
