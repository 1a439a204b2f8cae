"""Figures of a server of a shard, for tests of metrics."""

from kvpool.core.statistics import Histogram
from kvpool.server.metrics.cluster_metrics import ShardSample


def shard_sample() -> ShardSample:
    """A primary with one standby, and one wait of 0.5 s for it."""
    confirm_seconds = Histogram((0.001, 1.0))
    confirm_seconds.observe(0.5)
    return ShardSample(
        shard="prod/llama",
        role="primary",
        term=7,
        in_sync_servers=2,
        is_alone=False,
        standbys_missing=1,
        takeovers=1,
        standbys_connected=1,
        lag_positions=3,
        lag_seconds=0.2,
        confirm_seconds=confirm_seconds,
        records=11,
        sent_bytes=1300,
        is_directory_up=True,
        lost_states=1,
        differences=0,
    )
